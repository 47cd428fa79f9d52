"""How long things take: a linear model of forward passes and of moving checkpoints, every constant by name."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dasc.cache.records import TransferKind

MAX_SECONDS = 1e6
"""Larger constants are a slip of the hand, and sums of them would not stay finite."""


@dataclass(frozen=True)
class CostModel:
    """Constants of a server, all in seconds, from 0 to :data:`MAX_SECONDS`.

    A forward pass takes ``step_s``, plus the prefill terms, plus the decode terms when any sequence decodes. Transfers
    take a latency plus a time for each byte of the fullest rank; loads and copies hold up the forward pass, stores and
    demotions run beside it.

    Attributes:
        step_s: each forward pass: scheduling and launches.
        prefill_s_per_token: each new prompt token, and each token replayed in the request's own prefill.
        prefill_s_per_pair: each query-key pair of full attention for those tokens.
        decode_step_s: each pass in which any sequence decodes: reading the weights.
        decode_s_per_sequence: each decoding sequence: its recurrent state, its experts.
        decode_s_per_context_token: each token of KV that decoding reads.
        load_latency_s: each load of a compressed checkpoint.
        load_s_per_byte: its inverse bandwidth.
        store_latency_s: each insertion into the compressed pool.
        store_s_per_byte: its inverse bandwidth.
        demote_latency_s: each demotion from the dense to the compressed tier.
        demote_s_per_byte: its inverse bandwidth.
        copy_latency_s: each batch of dense copies.
        copy_s_per_byte: its inverse bandwidth.
        collective_latency_s: added to each load, store and demotion when storage is balanced over ranks (B.1).
        two_pass_s: each hit whose window is replayed in a second forward pass.
        two_pass_s_per_token: each token of that window.

    Raises:
        ValueError: naming a constant that is negative, above ``MAX_SECONDS`` or not a number.
    """

    step_s: float
    prefill_s_per_token: float
    prefill_s_per_pair: float
    decode_step_s: float
    decode_s_per_sequence: float
    decode_s_per_context_token: float
    load_latency_s: float
    load_s_per_byte: float
    store_latency_s: float
    store_s_per_byte: float
    demote_latency_s: float
    demote_s_per_byte: float
    copy_latency_s: float
    copy_s_per_byte: float
    collective_latency_s: float
    two_pass_s: float
    two_pass_s_per_token: float

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if not isinstance(value, int | float) or isinstance(value, bool):
                raise ValueError(f"cost {name} must be a number of seconds, got {value!r}")
            if not 0 <= value <= MAX_SECONDS:
                raise ValueError(f"cost {name} must be from 0 to {MAX_SECONDS:.0f} s, got {value!r}")

    def forward_s(self, prefill_tokens: int, prefill_pairs: int, decode_sequences: int, decode_pairs: int) -> float:
        """One forward pass; arguments as in :class:`~dasc.cache.records.StepRecord`, refresh counted as prefill."""
        seconds = self.step_s + self.prefill_s_per_token * prefill_tokens + self.prefill_s_per_pair * prefill_pairs
        if decode_sequences:
            seconds += (
                self.decode_step_s
                + self.decode_s_per_sequence * decode_sequences
                + self.decode_s_per_context_token * decode_pairs
            )
        return seconds

    def _decode_terms(self, sequences: int, context_tokens: int) -> tuple[float, float]:
        """Step ``i`` of a constant batch, counted from 0, takes ``first + i * growth`` seconds."""
        growth = self.decode_s_per_context_token * sequences
        return self.forward_s(0, 0, sequences, context_tokens), growth

    def decode_s(self, steps: int, sequences: int, context_tokens: int) -> float:
        """``steps`` passes that only decode, the same ``sequences`` (at least one) in each.

        Args:
            context_tokens: read by the first pass; each pass adds one token a sequence.
        """
        first, growth = self._decode_terms(sequences, context_tokens)
        return steps * first + growth * (steps * (steps - 1) / 2)

    def decode_steps_until(self, seconds: float, sequences: int, context_tokens: int) -> int:
        """The fewest such passes, at least one, that take ``seconds`` or longer. The model must not be all zero."""
        first, growth = self._decode_terms(sequences, context_tokens)
        linear = first - growth / 2
        root = 2 * max(seconds, 0.0) / (linear + math.sqrt(linear**2 + 2 * growth * max(seconds, 0.0)))
        return max(math.ceil(root), 1)

    def transfer_s(self, kind: TransferKind, size_bytes: int) -> float:
        """One movement of ``size_bytes`` on the fullest rank, collectives left out."""
        latency: float = getattr(self, f"{kind}_latency_s")
        per_byte: float = getattr(self, f"{kind}_s_per_byte")
        return latency + per_byte * size_bytes

    def scaled(self, factor: float) -> CostModel:
        """The same server, ``factor`` times as slow in everything.

        Raises:
            ValueError: for a factor that is not positive and finite, or that makes a constant too large.
        """
        if not 0 < factor < math.inf:
            raise ValueError(f"factor must be positive and finite, got {factor}")
        return CostModel(**{name: value * factor for name, value in dataclasses.asdict(self).items()})

    def replaced(self, values: Mapping[str, object]) -> CostModel:
        """With the named constants changed.

        Raises:
            ValueError: for an unknown name or a value that no constant can have.
        """
        names = [field.name for field in dataclasses.fields(self)]
        for name in values:
            if name not in names:
                raise ValueError(f"unknown cost {name!r}: expected one of {', '.join(names)}")
        return dataclasses.replace(self, **values)  # type: ignore[arg-type]


def parse_costs(items: Iterable[str]) -> dict[str, object]:
    """Constants from a command line: each item is ``name=seconds`` or a JSON file of them. Later items win.

    Raises:
        ValueError: for an item that is neither, or a file that does not hold an object of numbers.
        OSError: for a file that cannot be read.
    """
    values: dict[str, object] = {}
    for item in items:
        name, equals, number = item.partition("=")
        if not equals:
            values |= read_costs(item)
            continue
        try:
            values[name.strip()] = float(number)
        except ValueError as error:
            raise ValueError(f"cost {name} must be a number of seconds, got {number!r}") from error
    return values


def read_costs(path: str | os.PathLike[str]) -> dict[str, object]:
    """Constants from a JSON file, such as ``dasc calibrate`` writes.

    Raises:
        ValueError: naming the file, when it holds no JSON object.
        OSError: when it cannot be read.
    """
    with open(path, encoding="utf-8") as file:
        try:
            values = json.load(file)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected an object of costs, got a {type(values).__name__}")
    return values
