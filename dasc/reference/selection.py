"""Which units a checkpoint keeps: by horizon (section 4.1), or at random with the same counts (section 5.2)."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

RANDOM_MASK_SEEDS = (1234, 2027, 3407, 4519, 5683)
"""Seeds of the paper's five Random masks (appendix C.2). Only the seeds are its own; it does not name a generator."""


def select_units(horizons: Tensor, w_max: float) -> Tensor:
    """The units to keep: *global* where ``H_s > W_max``, strictly; *local* otherwise (section 4.1).

    Args:
        horizons: ``[L, U]`` float64, tokens, positive; ``inf`` is always kept.
        w_max: ``W_max``, tokens, positive and finite.

    Returns:
        ``[L, U]`` bool, true where kept.

    Raises:
        ValueError: for horizons of another dtype (a cast could move a unit across the cutoff), shape or sign, or a
            wrong ``w_max``.
    """
    if horizons.dtype != torch.float64 or horizons.ndim != 2:
        raise ValueError(f"horizons must be float64 [L, U], got {horizons.dtype} {list(horizons.shape)}")
    if not (horizons > 0).all():
        raise ValueError("horizons must be positive, got NaN, zero or negative ones")
    if not (math.isfinite(w_max) and w_max > 0):
        raise ValueError(f"w_max must be positive and finite, got {w_max}")
    return horizons > w_max


def select_largest(signal: Tensor, count: int) -> Tensor:
    """The ``count`` units with the largest observed signal, over all layers together; of equal ones the first.

    For what static horizons cannot tell: a unit with a long one may hold little, and gates may hold on to tokens for
    longer than they do at the representative input.

    Args:
        signal: ``[L, U]`` float64 without NaN, such as magnitudes ``M_S`` (eq. 5).
        count: from 0 to all units.

    Returns:
        ``[L, U]`` bool, true where kept.

    Raises:
        ValueError: for a signal of another dtype or rank, or with NaN, or a count outside its range.
    """
    if signal.dtype != torch.float64 or signal.ndim != 2:
        raise ValueError(f"signal must be float64 [L, U], got {signal.dtype} {list(signal.shape)}")
    if signal.isnan().any():
        raise ValueError("signal must be numbers, got NaN")
    if not 0 <= count <= signal.numel():
        raise ValueError(f"count must be 0 to {signal.numel()} units, got {count}")
    mask = torch.zeros_like(signal, dtype=torch.bool)
    mask.view(-1)[signal.flatten().argsort(descending=True, stable=True)[:count]] = True
    return mask


def random_mask(mask: Tensor, seed: int) -> Tensor:
    """A mask that keeps as many units of each layer as ``mask``, chosen uniformly (the Random arm of section 5.2).

    Each unit of layer ``l`` draws a 64-bit key from PCG64 seeded with ``(seed, l)`` and the smallest keys are kept.
    NumPy guarantees that stream on every platform and in every version, which it does not for its distributions.

    Args:
        mask: ``[L, U]`` bool.
        seed: not negative, e.g. one of :data:`RANDOM_MASK_SEEDS`.

    Raises:
        ValueError: for a mask of another dtype or rank, or a negative seed.
    """
    if mask.dtype != torch.bool or mask.ndim != 2:
        raise ValueError(f"mask must be torch.bool [L, U], got {mask.dtype} {list(mask.shape)}")
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    drawn = torch.zeros_like(mask)
    for layer, kept in enumerate(mask.sum(dim=1).tolist()):
        keys = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(layer,))).random_raw(mask.shape[1])
        drawn[layer, torch.from_numpy(np.argsort(keys, kind="stable")[:kept])] = True
    return drawn
