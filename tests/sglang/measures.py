"""How answers are compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.sglang.engines import Answer
from tests.sglang.peer import PeerAnswer
from tests.sglang.tiny_models import VOCAB


def tokens(answers: Sequence[Sequence[Answer | PeerAnswer]]) -> list[list[list[int]]]:
    """Generated tokens by conversation and turn."""
    return [[answer.tokens for answer in turns] for turns in answers]


def distributions(answers: Sequence[Sequence[Answer | PeerAnswer]]) -> Tensor:
    """Log-probabilities of the whole vocabulary at each generated token, ``[tokens, vocab]`` float64."""
    flat = [answer for turns in answers for answer in turns]
    return torch.cat([a.log_probabilities if isinstance(a, PeerAnswer) else _scattered(a) for a in flat])


def _scattered(answer: Answer) -> Tensor:
    rows = torch.full((len(answer.tokens), VOCAB), float("nan"), dtype=torch.float64)
    for row, place in zip(rows, answer.top_logprobs):
        ids, values = zip(*place)
        row[list(ids)] = torch.tensor(values, dtype=torch.float64)
    return rows


def assert_same_distributions(
    found: Sequence[Sequence[Answer]],
    exact: Sequence[Sequence[PeerAnswer]],
    same_precision: Sequence[Sequence[PeerAnswer]],
) -> None:
    """Assert that SGLang is at most twice as far from FP64 as plain PyTorch in its own precision, over all tokens."""
    truth = distributions(exact)
    error = _rms(distributions(found) - truth)
    budget = 2 * _rms(distributions(same_precision) - truth)
    assert budget < 2e-5, "rounding alone"
    assert error <= budget, f"error {error:.1e}, more than {budget:.1e}"


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()
