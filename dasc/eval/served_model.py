"""Small models that are served from a cache, and how it stores their states."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from dasc.cache.storage import StateCodec
from dasc.eval.chat_tokens import ByteTokens
from dasc.geometry import DtypePolicy, Quantization
from dasc.models import Checkpoint, read_checkpoint
from dasc.models.hybrid import DeltaRuleOps, HybridModel, load_hybrid, random_hybrid, save_hybrid


class ServingOps(DeltaRuleOps, StateCodec, Protocol):
    """What a replay computes with: :mod:`dasc.reference`, or anything else that offers the same names."""


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A model that runs, and what its plans are made from.

    Attributes:
        model: runs, in FP32.
        checkpoint: its decay parameters.
        codec: packs and unpacks states.
    """

    model: HybridModel
    checkpoint: Checkpoint
    codec: StateCodec


def load_served(folder: Path, ops: ServingOps) -> ServedModel:
    """The model in ``folder``, on the CPU.

    Raises:
        ValueError: for a folder that is no small Qwen3-Next or Kimi-Linear model.
    """
    config, weights = load_hybrid(folder)
    return ServedModel(HybridModel(config, weights, ops), read_checkpoint(folder), ops)


def state_dtypes(model: HybridModel, *, quantized: Quantization | None = None) -> DtypePolicy:
    """FP32 temporal states, or FP64 in a model of FP64, and convolution rows in the model's own dtype.

    Rows rounded to BF16 would make what an FP32 model answers depend on where its forwards end.
    """
    return DtypePolicy(torch.promote_types(model.dtype, torch.float32), model.dtype, quantized)


def save_demo_model(folder: Path) -> None:
    """Write a small Kimi-Linear of random weights that reads bytes.

    Three KDA layers of two heads of 64 x 64, one attention layer. Horizons are spread evenly on a log scale from 1 to
    64 tokens, so that a cutoff of 16 keeps about a third of the channels, as in Kimi-Linear-48B (section 4.1).
    """
    config, weights = random_hybrid(
        "kda",
        seed=2,
        vocab_size=ByteTokens.vocabulary,
        hidden_size=64,
        num_blocks=4,
        num_value_heads=2,
        head_v_dim=64,
        head_k_dim=64,
        horizons_tokens=(1.0, 64.0),
    )
    save_hybrid(folder, config, weights)
