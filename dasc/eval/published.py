"""The published equal-memory figures (96 dense slots, TP 2, shared-prefix load), beside what the simulator predicts.

One number is fitted for each model: a factor on all costs, so that the Dense arm has the published mean TTFT. Hit rates,
and everything of the Padded and Ragged arms, are predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dasc.accounting import usable_slots
from dasc.cache.config import CacheConfig
from dasc.cache.simulation import MODEL_SIZES, CostModel, Serving, Simulation, estimate_cost, shared_prefix_load, simulate
from dasc.eval.simulate import ARMS, SimulatedModel, load_model, slot_bytes
from dasc.models.synthetic import GEOMETRIES

RANKS = 2
DENSE_SLOTS = 96
CONCURRENCY = 16


@dataclass(frozen=True)
class PublishedRow:
    """One row of the published table."""

    model: str
    arm: str
    slots: int
    hit_rate: float
    ttft_ms: float


PUBLISHED = (
    PublishedRow("kimi-linear", "dense", 96, 0.589, 248.8),
    PublishedRow("kimi-linear", "padded", 161, 0.759, 182.6),
    PublishedRow("kimi-linear", "ragged", 267, 0.973, 82.9),
    PublishedRow("qwen3-next", "dense", 96, 0.605, 499.5),
    PublishedRow("qwen3-next", "padded", 99, 0.603, 499.5),
    PublishedRow("qwen3-next", "ragged", 128, 0.717, 426.3),
)


@dataclass(frozen=True)
class Prediction:
    """A published row and what comes out here, means over the seeds.

    Attributes:
        published: the row.
        slots: usable slots by our accounting: bottleneck rank, convolution rows and the reserved slot counted (C.1).
        hit_rate: predicted token hit rate with the *published* slots.
        ttft_ms: predicted mean TTFT with the published slots.
        own_hit_rate: with our ``slots``.
        own_ttft_ms: with our ``slots``.
        scale: the factor fitted to the model's Dense row.
    """

    published: PublishedRow
    slots: int
    hit_rate: float
    ttft_ms: float
    own_hit_rate: float
    own_ttft_ms: float
    scale: float
