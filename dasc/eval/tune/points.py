"""Ways to store checkpoints, and what each was measured to lose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dasc.eval.states import Measure
from dasc.eval.statistics import CONFIDENCE, paired
from dasc.geometry import Quantization

_TAIL = (1 - CONFIDENCE) / 2


@dataclass(frozen=True)
class Loss:
    """What a point loses to dense checkpoints, paired by example.

    Attributes:
        mean: over the examples.
        upper: by :func:`upper_limit`.
    """

    mean: float
    upper: float


@dataclass(frozen=True)
class Point:
    """One way to store and load checkpoints.

    Attributes:
        w_max: cutoff in tokens; ``None`` stores all units.
        refresh: WR instead of NR.
        observed: as many units as the cutoff keeps, those with the largest observed magnitudes; by NR.
        quantized: units as INT8 or INT4.
        checkpoint_bytes: of one checkpoint.
        replay_tokens: that a hit replays at most; 0 for NR.
        accuracy: loss of accuracy, as a share of answers.
        log_prob: loss of the log-probability of right answers, nats an answer.
    """

    w_max: int | None
    refresh: bool
    observed: bool
    quantized: Quantization | None
    checkpoint_bytes: int
    replay_tokens: int
    accuracy: Loss
    log_prob: Loss

    @property
    def label(self) -> str:
        """``NR 16``, ``WR 16 INT8``, ``observed 16`` or ``all INT4``."""
        return point_label(self.w_max, refresh=self.refresh, observed=self.observed, quantized=self.quantized)

    def loss(self, measure: Measure) -> Loss:
        """By the name of its attribute."""
        return self.accuracy if measure == "accuracy" else self.log_prob


def point_label(w_max: int | None, *, refresh: bool, observed: bool, quantized: Quantization | None) -> str:
    """See :attr:`Point.label`."""
    how = "observed" if observed else "WR" if refresh else "NR"
    units = "all" if w_max is None else f"{how} {w_max}"
    return f"{units} {quantized.upper()}" if quantized else units


def upper_limit(differences: Sequence[float], measure: Measure) -> float:
    """Upper end of the 95 % interval of a mean difference.

    Losses of accuracy are rare and up to 1, and resampling does not show what no example happened to lose. ``n``
    examples without a loss say no more than that one has a probability of at most ``1 - 0.025 ** (1 / n)``; so no upper
    limit of accuracy is below that, and a point is not preferred for the few changes that were seen.

    Raises:
        ValueError: for no differences.
    """
    high = paired(differences).high
    return max(high, 1 - _TAIL ** (1 / len(differences))) if measure == "accuracy" else high


def fewest_examples(budget: float) -> int:
    """Examples that it takes to show a loss of accuracy of at most ``budget``, within ``(0, 1)``, if none is seen."""
    return math.ceil(math.log(_TAIL) / math.log1p(-budget))
