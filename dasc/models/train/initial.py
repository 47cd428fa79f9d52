"""Weights to begin training with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dasc.models.families import family_of_name
from dasc.models.hybrid.config import HybridConfig
from dasc.models.hybrid.model import read_layers
from dasc.models.hybrid.weights import WeightReader

_RATES = (1.0, 16.0)
_STEPS = (1e-3, 0.1)


def initial_weights(config: HybridConfig, seed: int) -> dict[str, Tensor]:
    """FP32 weights by name.

    Decays begin as those of Mamba-2, GDN and KDA do: rates ``exp(A_log)`` evenly in 1 .. 16 and steps
    ``softplus(dt_bias)`` evenly on a log scale in 0.001 .. 0.1, so that horizons go from a few tokens to thousands.
    With the safe gate, whose scale means something else, ``exp(A_log)`` is 1 and ``dt_bias`` set for the same decays.

    Args:
        config: of a model without experts.
        seed: of everything random.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = _Shapes(config)
    read_layers(config, shapes)
    weights = {name: _drawn(name, shape, config, generator) for name, shape in shapes.named.items()}
    for name, shape in shapes.named.items():
        if name.endswith(".dt_bias"):
            A_log, weights[name] = _decay(shape, config, generator)
            stored = weights[name.removesuffix("dt_bias") + "A_log"]
            stored.view(-1)[: len(A_log)] = A_log
    return weights


class _Shapes(WeightReader):
    """Answers every request with zeros, and keeps the shape asked for."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__({}, torch.float32, torch.device("cpu"))
        self.named: dict[str, tuple[int, ...]] = {}
        self._family = family_of_name(config.geometry.family)

    def take_heads(self, name: str, heads: int) -> Tensor:
        self.named[name] = self._family.A_log_shape(heads)
        return torch.zeros(heads)

    def _checked(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self.named[name] = shape
        return torch.zeros(shape)


def _drawn(name: str, shape: tuple[int, ...], config: HybridConfig, generator: torch.Generator) -> Tensor:
    if "norm" in name:
        return torch.full(shape, config.stored_one(name))
    if len(shape) == 1 or name.endswith("A_log"):
        return torch.zeros(shape)
    if "conv1d" in name:
        return torch.rand(shape, generator=generator) - 0.5
    deviation = 0.1 if "embed_tokens" in name else 0.02 if "lm_head" in name else shape[-1] ** -0.5
    if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
        deviation /= math.sqrt(2 * config.geometry.num_blocks)  # the residual stream begins as wide as it is deep
    return deviation * torch.randn(shape, generator=generator)


def _decay(shape: tuple[int, ...], config: HybridConfig, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """``A_log`` ``[HV]`` and ``dt_bias`` of ``shape``."""
    heads = config.geometry.num_value_heads
    rate = _RATES[0] + (_RATES[1] - _RATES[0]) * torch.rand(heads, 1, generator=generator)
    low, high = (math.log(step) for step in _STEPS)
    step = (low + (high - low) * torch.rand(heads, shape[0] // heads, generator=generator)).exp()
    if config.lower_bound is None:
        return rate.log().flatten(), torch.special.expm1(step).log().flatten()
    return torch.zeros(heads), torch.logit(rate * step / -config.lower_bound).flatten()
