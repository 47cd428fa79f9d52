"""Errors of states and of predictions, token by token after a hit."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from dasc.eval.states import Arm, Prefixes, advance
from dasc.eval.states.recording import Given, RecordingOps
from dasc.models.hybrid import DeltaRuleOps
from dasc.reference import omission_bound, omission_estimate

_NEGLIGIBLE = 1e-6  # of a state: what FP64 leaves of an error below it is rounding


def follow(
    dense: Prefixes, arms: Mapping[str, Arm], continuations: Sequence[Sequence[int]], ticks: Sequence[int]
) -> dict[str, Any]:
    """Go on with the same tokens from dense prefixes and from what arms leave of them, and compare at some ticks.

    Args:
        dense: prefixes of a model in FP64, or rounding hides what is left in the end.
        arms: by name.
        continuations: at least ``ticks[-1]`` tokens of each prefix.
        ticks: tokens since the hit at which to compare, from 0, ascending.

    Returns:
        Plain JSON values. ``norm`` ``[ticks][L]``: squares of the dense states, summed over prefixes. For each arm:

        * ``error``, ``given_inputs``, ``estimate``, ``bound``, each ``[ticks][L]``: sums of squares of what the state
          is off; of what would be left of the first error if the layer's inputs were the dense ones; and of
          :func:`~dasc.reference.omission_estimate` and :func:`~dasc.reference.omission_bound` of those inputs.
        * ``error_over_bound`` ``[L]``: the largest of any prefix, head and tick; exceeds 1 only where inputs differ.
        * ``kl``, ``changed`` ``[ticks - 1]``: divergence of the predictions from the dense ones in nats, and share of
          tokens whose likeliest successor is another, means over the tokens since the tick before.

    Raises:
        ValueError: for ticks that do not ascend from 0, or shorter continuations.
    """
    if len(ticks) < 2 or ticks[0] != 0 or any(a >= b for a, b in pairwise(ticks)):
        raise ValueError(f"ticks must ascend from 0, got {list(ticks)}")
    if len(continuations) != len(dense) or min(map(len, continuations)) < ticks[-1]:
        raise ValueError(f"continuations must be {len(dense)} of at least {ticks[-1]} tokens each")
    model, ops = dense.model, dense.model.ops
    recorder = RecordingOps(ops)
    dense = dataclasses.replace(dense, model=model.with_ops(cast(DeltaRuleOps, recorder)))
    held = {name: arm(dataclasses.replace(dense, model=model)) for name, arm in arms.items()}
    traces = {name: _Trace(prefixes.temporal - dense.temporal, ops) for name, prefixes in held.items()}
    norm = [_squares(dense.temporal)]
    for first, end in pairwise(ticks):
        tokens = [continuation[first:end] for continuation in continuations]
        wanted, dense = advance(dense, tokens)
        given = recorder.take(len(dense.temporal), len(dense))
        norm.append(_squares(dense.temporal))
        for name, trace in traces.items():
            logits, held[name] = advance(held[name], tokens)
            trace.go_on(held[name].temporal, dense.temporal, given)
            trace.compare(torch.cat(logits), torch.cat(wanted))
    return {"norm": norm, "arms": {name: trace.as_dict() for name, trace in traces.items()}}


class _Trace:
    """One arm on its way.

    Args:
        error: ``[L, n, HV, V, K]`` at the hit.
        ops: carry errors on.
    """

    def __init__(self, error: Tensor, ops: DeltaRuleOps) -> None:
        self._start, self._ops = error, ops
        self._left = list(error)
        self._g: list[Tensor] = []
        first = _squares(error)
        self._sums = {name: [first] for name in ("error", "given_inputs", "estimate", "bound")}
        self._ratio = torch.zeros(len(error), dtype=torch.float64)
        self._kl: list[float] = []
        self._changed: list[float] = []

    def go_on(self, state: Tensor, dense: Tensor, given: Sequence[Given]) -> None:
        """Compare states ``[L, n, HV, V, K]`` after the tokens that layers were given."""
        self._left = [_carry_on(left, layer, self._ops) for left, layer in zip(self._left, given)]
        gates = [layer.g for layer in given]
        self._g = [torch.cat(pair, dim=1) for pair in zip(self._g, gates)] if self._g else gates
        bound = torch.stack([omission_bound(e, g)[:, -1] for e, g in zip(self._start, self._g)])
        estimate = torch.stack([omission_estimate(e, g)[:, -1] for e, g in zip(self._start, self._g)])
        error = state - dense
        self._sums["error"].append(_squares(error))
        self._sums["given_inputs"].append(_squares(torch.stack(self._left)))
        self._sums["estimate"].append(_squares(estimate))
        self._sums["bound"].append(_squares(bound))
        counts = bound > _NEGLIGIBLE * dense.norm(dim=(-2, -1))
        ratio = torch.where(counts, error.norm(dim=(-2, -1)) / bound, 0.0)
        self._ratio = torch.maximum(self._ratio, ratio.amax(dim=(1, 2)))

    def compare(self, logits: Tensor, wanted: Tensor) -> None:
        """Compare predictions ``[tokens, vocab]``."""
        said, right = logits.double().log_softmax(dim=-1), wanted.double().log_softmax(dim=-1)
        self._kl.append(float((right.exp() * (right - said)).sum(dim=-1).mean()))
        self._changed.append(float((logits.argmax(dim=-1) != wanted.argmax(dim=-1)).double().mean()))

    def as_dict(self) -> dict[str, Any]:
        return {**self._sums, "error_over_bound": self._ratio.tolist(), "kl": self._kl, "changed": self._changed}


def _carry_on(error: Tensor, given: Given, ops: DeltaRuleOps) -> Tensor:
    """What becomes of ``error`` ``[n, HV, V, K]`` if both states see what was given: the recurrence without values."""
    n, T, HV = given.beta.shape
    run = ops.chunk_gdn if given.g.ndim == 3 else ops.chunk_kda
    nothing = error.new_zeros(n, T, HV, error.shape[-2])
    return run(given.k, given.k, nothing, given.g, given.beta, initial_state=error, use_qk_l2norm=True).final_state


def _squares(x: Tensor) -> list[float]:
    """Sum of squares of each layer."""
    sums: list[float] = x.double().square().flatten(1).sum(dim=1).tolist()
    return sums
