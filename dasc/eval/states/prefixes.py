"""Prefixes and what a cache holds of them: states at their end and KV rows of their tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from dasc.eval.served_model import state_dtypes
from dasc.models.hybrid import Batch, HybridModel, KVPool, SequenceInput, StatePool

_BATCH_TOKENS = 2048  # about the fastest for small models on one core
_BATCH_ROWS = 65_536  # each sequence of a forward gathers its rows

Tokens = Sequence[int]


@dataclass(frozen=True, eq=False)
class Prefixes:
    """``n`` prefixes of a model. Nothing in this package writes to the tensors of one; it makes others.

    Attributes:
        model: computes them.
        tokens: token ids of each prefix.
        temporal: ``[L, n, HV, V, K]``, state after each prefix's last token, FP32 or the model's FP64.
        conv: ``[L, n, channels, width - 1]``, in the model's dtype.
        kv: ``[A, rows, width]``, KV rows of all tokens of the first prefix, then of the second, and so on.
    """

    model: HybridModel
    tokens: tuple[tuple[int, ...], ...]
    temporal: Tensor
    conv: Tensor
    kv: Tensor

    def __post_init__(self) -> None:
        states, kv = _pools(self.model, 1, 1)
        count, rows = len(self.tokens), sum(map(len, self.tokens))
        for name, like, size in (
            ("temporal", states.temporal, count),
            ("conv", states.conv, count),
            ("kv", kv.rows, rows),
        ):
            tensor, expected = getattr(self, name), [like.shape[0], size, *like.shape[2:]]
            if list(tensor.shape) != expected or tensor.dtype != like.dtype:
                raise ValueError(f"{name} must be {like.dtype} {expected}, got {tensor.dtype} {list(tensor.shape)}")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def bounds(self) -> list[int]:
        """``n + 1`` bounds in ``kv``: the rows of prefix ``i`` are ``bounds[i] .. bounds[i + 1] - 1``."""
        return list(accumulate(map(len, self.tokens), initial=0))

    @classmethod
    def of(cls, model: HybridModel, contexts: Sequence[Tokens]) -> Prefixes:
        """Prefill ``contexts`` densely.

        Raises:
            ValueError: for no contexts, an empty one, or token ids that the model does not have.
        """
        if not contexts:
            raise ValueError("contexts must hold a prefix, got none")
        states, kv = _pools(model, len(contexts), 0)
        nothing = cls(model, ((),) * len(contexts), states.temporal, states.conv, kv.rows)
        parts = [
            part._replace(logits=part.logits.new_empty(0)) for part in continued(nothing, list(enumerate(contexts)))
        ]
        return _longer(nothing, contexts, parts)


class Continued(NamedTuple):
    """One forward over continuations of prefixes.

    Attributes:
        first: number of the first continuation.
        logits: of all their tokens, ``[tokens, vocab]``.
        temporal: ``[L, continuations, HV, V, K]`` after them.
        conv: ``[L, continuations, channels, width - 1]`` after them.
        kv: ``[A, tokens, width]``, their own KV rows.
    """

    first: int
    logits: Tensor
    temporal: Tensor
    conv: Tensor
    kv: Tensor


def continued(prefixes: Prefixes, continuations: Sequence[tuple[int, Tokens]]) -> Iterator[Continued]:
    """Run continuations, each by itself, from what ``prefixes`` hold; a prefix may have any number of them.

    Args:
        prefixes: are not changed.
        continuations: number of the prefix, ascending, and at least one token.

    Yields:
        The continuations in order, several at a time.

    Raises:
        ValueError: for numbers that do not ascend, a continuation without tokens, or unknown token ids.
    """
    owners = [owner for owner, _ in continuations]
    if owners != sorted(owners) or (owners and not 0 <= owners[0] <= owners[-1] < len(prefixes)):
        raise ValueError(f"continuations must be in the order of the {len(prefixes)} prefixes")
    sizes = [(len(tokens), len(prefixes.tokens[owner]) + len(tokens)) for owner, tokens in continuations]
    for first, end in batches(sizes):
        yield _forward(prefixes, continuations, first, end)


def batches(sizes: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """First and end of consecutive sequences that one forward takes; ``sizes``: tokens computed and KV rows read."""
    first = tokens = rows = 0
    for number, (its_tokens, its_rows) in enumerate(sizes):
        if number and (tokens + its_tokens > _BATCH_TOKENS or rows + its_rows > _BATCH_ROWS):
            yield first, number
            first = number
            tokens = rows = 0
        tokens += its_tokens
        rows += its_rows
    if sizes:
        yield first, len(sizes)


def _forward(prefixes: Prefixes, continuations: Sequence[tuple[int, Tokens]], first: int, end: int) -> Continued:
    """One forward over ``continuations[first:end]``: states of their prefixes in the first slots, their own after."""
    model, bounds, part = prefixes.model, prefixes.bounds, continuations[first:end]
    low, high = part[0][0], part[-1][0] + 1
    old_rows = prefixes.kv[:, bounds[low] : bounds[high]]
    states, kv = _pools(model, high - low + len(part), old_rows.shape[1] + sum(len(tokens) for _, tokens in part))
    states.temporal[:, : high - low] = prefixes.temporal[:, low:high]
    states.conv[:, : high - low] = prefixes.conv[:, low:high]
    kv.rows[:, : old_rows.shape[1]] = old_rows
    sequences, row = [], old_rows.shape[1]
    for slot, (owner, tokens) in enumerate(part, start=high - low):
        read = torch.arange(bounds[owner] - bounds[low], bounds[owner + 1] - bounds[low])
        written = torch.arange(row, row := row + len(tokens))
        sequences.append(
            SequenceInput(
                tokens=torch.tensor(tokens, dtype=torch.int64),
                start=len(read),
                state_slot=slot,
                kv_slots=torch.cat([read, written]),
                source_slot=owner - low,
            )
        )
    logits = model.forward(Batch(tuple(sequences)), states, kv, all_tokens=True)
    return Continued(
        first,
        logits,
        states.temporal[:, high - low :],
        states.conv[:, high - low :],
        kv.rows[:, old_rows.shape[1] :],
    )


def advance(prefixes: Prefixes, tokens: Sequence[Tokens]) -> tuple[list[Tensor], Prefixes]:
    """Go on with given tokens.

    Args:
        prefixes: are not changed.
        tokens: of each prefix, at least one.

    Returns:
        Logits ``[len(tokens[i]), vocab]`` of the tokens of each prefix; and the prefixes that end after them.

    Raises:
        ValueError: for other than one continuation a prefix, and as :func:`continued`.
    """
    if len(tokens) != len(prefixes):
        raise ValueError(f"tokens must be of each of the {len(prefixes)} prefixes, got {len(tokens)}")
    parts = list(continued(prefixes, list(enumerate(tokens))))
    logits = torch.cat([part.logits for part in parts])
    return list(torch.split(logits, [len(t) for t in tokens])), _longer(prefixes, tokens, parts)


def _longer(prefixes: Prefixes, tokens: Sequence[Tokens], parts: Sequence[Continued]) -> Prefixes:
    """The prefixes after one continuation each."""
    counts = [len(t) for t in tokens]
    new = torch.split(torch.cat([part.kv for part in parts], dim=1), counts, dim=1)
    old = torch.split(prefixes.kv, [len(t) for t in prefixes.tokens], dim=1)
    return dataclasses.replace(
        prefixes,
        tokens=tuple((*before, *after) for before, after in zip(prefixes.tokens, tokens)),
        temporal=torch.cat([part.temporal for part in parts], dim=1),
        conv=torch.cat([part.conv for part in parts], dim=1),
        kv=torch.cat([rows for pair in zip(old, new) for rows in pair], dim=1),
    )


def _pools(model: HybridModel, states: int, rows: int) -> tuple[StatePool, KVPool]:
    return model.new_states(states, state_dtypes(model)), model.new_kv(rows)
