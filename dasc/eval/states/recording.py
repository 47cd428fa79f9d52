"""What a model's recurrent layers were given, noted while it runs."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dasc.contract import DeltaRuleOutput
from dasc.models.hybrid import DeltaRuleOps

_RECURRENCES = ("chunk_gdn", "chunk_kda", "recurrent_gdn", "recurrent_kda")


class Given(NamedTuple):
    """What decides the fate of a difference of two states in one layer; ``n`` sequences of ``T`` tokens.

    Attributes:
        k: ``[n, T, H, K]``, before normalisation.
        g: ``[n, T, HV]`` or ``[n, T, HV, K]``.
        beta: ``[n, T, HV]``.
    """

    k: Tensor
    g: Tensor
    beta: Tensor


class RecordingOps:
    """The operators of ``ops``, noting keys and gates of each recurrence.

    Args:
        ops: that compute.
    """

    def __init__(self, ops: DeltaRuleOps) -> None:
        self._ops = ops
        self._calls: list[Given] = []

    def __getattr__(self, name: str) -> Any:
        operator = getattr(self._ops, name)
        return partial(self._note, operator) if name in _RECURRENCES else operator

    def _note(
        self, recurrence: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
    ) -> DeltaRuleOutput:
        self._calls.append(Given(k, g, beta))
        output: DeltaRuleOutput = recurrence(q, k, v, g, beta, **options)
        return output

    def take(self, layers: int, sequences: int) -> list[Given]:
        """What each layer was given since the last call, in forwards over sequences of one length, and forget it."""
        by_layer = [self._calls[layer::layers] for layer in range(layers)]
        self._calls = []
        return [
            Given(*(torch.cat(parts, dim=1).view(sequences, -1, *parts[0].shape[2:]) for parts in zip(*calls)))
            for calls in by_layer
        ]
