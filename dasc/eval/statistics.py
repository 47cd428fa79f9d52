"""Paired statistics over items (appendix C.2: the item is the statistical unit). Needs scipy (the ``eval`` extra).

Differences of an item's scores are bounded, mostly zero and often one-sided. So the interval of their mean is a BCa
bootstrap, which follows a skew as a t interval cannot; and the p-value is that of a sign-flip permutation test of the
same mean, exact where 2^n flips are few enough. Wilcoxon's test would drop the zeros and compare ranks, which is not
what is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

try:
    from scipy import stats
except ImportError as error:
    raise ImportError("statistics need scipy: pip install 'dasc[eval]'") from error

RESAMPLES = 9999
CONFIDENCE = 0.95
_SEED = 0
_BATCH_ELEMENTS = 1 << 22
"""Of resampled numbers that are in memory at once."""


@dataclass(frozen=True)
class Paired:
    """Mean difference of two arms over the same items.

    Attributes:
        mean: of the first arm less the second.
        low: lower end of the 95 % interval.
        high: upper end.
        p: two-sided.
        items: differences.
        changed: of them, not zero.
    """

    mean: float
    low: float
    high: float
    p: float
    items: int
    changed: int


def paired(differences: Sequence[float] | NDArray[np.float64]) -> Paired:
    """Interval and p-value of a mean difference.

    When all differences are equal there is nothing to resample and the interval is a point. That says that these items
    did not tell the arms apart, not that no item would.

    Args:
        differences: one an item, each finite.

    Raises:
        ValueError: for none, or one that is not finite.
    """
    d = np.asarray(differences, dtype=np.float64)
    if d.ndim != 1 or not d.size or not np.isfinite(d).all():
        raise ValueError(f"differences must be finite and at least one, got {d.size} of shape {list(d.shape)}")
    low = high = mean = float(d.mean())
    if np.ptp(d) > 0:
        interval = stats.bootstrap(
            (d,),
            np.mean,
            confidence_level=CONFIDENCE,
            n_resamples=RESAMPLES,
            method="BCa",
            batch=max(_BATCH_ELEMENTS // d.size, 1),
            rng=np.random.default_rng(_SEED),
        ).confidence_interval
        low, high = float(interval.low), float(interval.high)
    changed = d[d != 0]
    return Paired(mean, low, high, _sign_flip_p(changed), d.size, changed.size)


def share_interval(right: int, total: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share, ``right`` of ``total`` independent answers."""
    interval = stats.binomtest(right, total).proportion_ci(confidence_level=CONFIDENCE, method="wilson")
    return float(interval.low), float(interval.high)


def _sign_flip_p(changed: NDArray[np.float64]) -> float:
    """Two-sided p of the mean being 0 when the sign of each difference is a coin's. Zeros play no part in that."""
    if changed.size < 2:
        return 1.0  # of one difference, both signs are as far from 0
    result = stats.permutation_test(
        (changed,),
        np.mean,
        permutation_type="samples",
        n_resamples=RESAMPLES,
        batch=max(_BATCH_ELEMENTS // changed.size, 1),
        rng=np.random.default_rng(_SEED),
        vectorized=True,
    )
    return float(result.pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment over one family: ``max over smaller p of (m - rank) p``, at most 1.

    scipy has none: its ``false_discovery_control`` bounds another error.

    Raises:
        ValueError: for a p-value outside [0, 1].
    """
    if any(not 0 <= p <= 1 for p in p_values):
        raise ValueError(f"p-values must be in [0, 1], got {list(p_values)}")
    adjusted = [1.0] * len(p_values)
    least = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        least = max(least, min((len(p_values) - rank) * p_values[index], 1.0))
        adjusted[index] = least
    return adjusted


def mean_and_sd(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (``n - 1``), as over the five Random masks.

    Raises:
        ValueError: for fewer than two values.
    """
    if len(values) < 2:
        raise ValueError(f"a sample standard deviation takes at least two values, got {len(values)}")
    return float(np.mean(values)), float(np.std(values, ddof=1))
