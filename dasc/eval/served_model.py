"""Small models that are served from a cache, and how it stores their states."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from dasc.cache.storage import StateCodec
from dasc.geometry import DtypePolicy, Quantization
from dasc.magnitudes import UnitMagnitudes
from dasc.models import Checkpoint, read_checkpoint
from dasc.models.hybrid import DeltaRuleOps, HybridModel, load_hybrid


class ServingOps(DeltaRuleOps, StateCodec, Protocol):
    """What a replay computes with: :mod:`dasc.reference`, or anything else that offers the same names."""


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A model that runs, and what its plans are made from.

    Attributes:
        model: runs, in FP32.
        checkpoint: its decay parameters.
        codec: packs and unpacks states.
        magnitudes: of its units, where they were observed.
    """

    model: HybridModel
    checkpoint: Checkpoint
    codec: StateCodec
    magnitudes: UnitMagnitudes | None = None


def load_served(folder: Path, ops: ServingOps, *, magnitudes: Path | None = None) -> ServedModel:
    """The model in ``folder``, on the CPU.

    Args:
        folder: of the model.
        ops: to compute with.
        magnitudes: file of ``dasc observe``.

    Raises:
        ValueError: for a folder that is no small Qwen3-Next, OLMo-Hybrid or Kimi-Linear model, or a file that is not
            of it.
    """
    config, weights = load_hybrid(folder)
    checkpoint = read_checkpoint(folder)
    observed = None if magnitudes is None else UnitMagnitudes.load(magnitudes)
    if observed is not None:
        observed.check(checkpoint)
    return ServedModel(HybridModel(config, weights, ops), checkpoint, ops, observed)


def state_dtypes(model: HybridModel, *, quantized: Quantization | None = None) -> DtypePolicy:
    """FP32 temporal states, or FP64 in a model of FP64, and convolution rows in the model's own dtype.

    Rows rounded to BF16 would make what an FP32 model answers depend on where its forwards end.
    """
    return DtypePolicy(torch.promote_types(model.dtype, torch.float32), model.dtype, quantized)
