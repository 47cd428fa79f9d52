"""Tiny models of random weights, prefixes and questions of random tokens."""

from functools import cache

import torch
from torch import Tensor

import dasc.fast
from dasc.eval.states import Prefixes
from dasc.models.hybrid import HybridModel
from dasc.models.tasks import Question
from tests.models.hybrid_runs import random_tokens, tiny_model

LENGTHS = (7, 30, 1, 16)
# Question tokens, answer tokens
SHAPES = (((2, 1), (1, 3)), ((4, 2),), (), ((1, 1), (1, 1), (3, 4)))


@cache
def model_of(kind: str, gate: str = "softplus") -> HybridModel:
    """FP64."""
    return tiny_model(kind, gate, num_experts=0).with_ops(dasc.fast)


def tokens(length: int, seed: int) -> tuple[int, ...]:
    return tuple(random_tokens(length, seed).tolist())


def contexts() -> list[tuple[int, ...]]:
    return [tokens(length, seed) for seed, length in enumerate(LENGTHS)]


@cache
def prefixes_of(kind: str, gate: str = "softplus") -> Prefixes:
    return Prefixes.of(model_of(kind, gate), contexts())


def questions() -> list[list[Question]]:
    return [
        [Question(tokens(q, 100 * i + j), tokens(a, 100 * i + j + 50)) for j, (q, a) in enumerate(shapes)]
        for i, shapes in enumerate(SHAPES)
    ]


def draw_mask(model: HybridModel, share: float = 0.5, seed: int = 0) -> Tensor:
    geometry = model.config.geometry
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(geometry.num_layers, geometry.units_per_layer, generator=generator) < share


def constant_mask(model: HybridModel, value: bool) -> Tensor:
    return torch.full((model.config.geometry.num_layers, model.config.geometry.units_per_layer), value)
