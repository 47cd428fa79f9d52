"""What can be done to cached prefixes before they are reused. Each function returns other prefixes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

import dasc.fast
from dasc.contract import DenseState, PackedState
from dasc.eval.served_model import state_dtypes
from dasc.eval.states.prefixes import Prefixes, batches
from dasc.geometry import Quantization
from dasc.layout import Layout, RaggedLayout
from dasc.models.hybrid import Batch, KVPool, SequenceInput, StatePool, WindowKV

Arm = Callable[[Prefixes], Prefixes]


class Codec(Protocol):
    """Stores and loads states: :mod:`dasc.fast` or :mod:`dasc.reference`."""

    def pack(self, state: Tensor, conv: Tensor, layout: Layout) -> PackedState: ...
    def unpack(self, packed: PackedState, layout: Layout) -> DenseState: ...


def zero_full_kv(prefixes: Prefixes) -> Prefixes:
    """Zero the KV rows of the full-attention layers (section 3.2)."""
    return dataclasses.replace(prefixes, kv=torch.zeros_like(prefixes.kv))


def zero_temporal(prefixes: Prefixes) -> Prefixes:
    """Zero the temporal states and leave the convolution rows: NR that keeps no unit."""
    return dataclasses.replace(prefixes, temporal=torch.zeros_like(prefixes.temporal))


def zero_linear(prefixes: Prefixes) -> Prefixes:
    """Zero the whole recurrent checkpoints, temporal states and convolution rows (section 3.2)."""
    return dataclasses.replace(zero_temporal(prefixes), conv=torch.zeros_like(prefixes.conv))


def zero_both(prefixes: Prefixes) -> Prefixes:
    """Zero KV rows and recurrent checkpoints (section 3.2)."""
    return zero_full_kv(zero_linear(prefixes))


def retain(
    prefixes: Prefixes, mask: Tensor, *, quantized: Quantization | None = None, codec: Codec = dasc.fast
) -> Prefixes:
    """Store the checkpoints in the ragged layout and load them again: DASC-NR (section 4.2).

    Args:
        prefixes: are not changed.
        mask: ``[L, U]`` bool, units that are stored; the others become zero. Convolution rows are kept whole.
        quantized: store units as INT8 or INT4 (eq. 8).
        codec: stores and loads.

    Raises:
        ValueError: for a mask of another shape, or states that cannot be quantised.
    """
    model = prefixes.model
    layout = RaggedLayout.from_mask(model.config.geometry, mask, state_dtypes(model, quantized=quantized))
    loaded = codec.unpack(codec.pack(prefixes.temporal, prefixes.conv, layout), layout)
    return dataclasses.replace(prefixes, temporal=loaded.temporal, conv=loaded.conv)


def refresh(prefixes: Prefixes, mask: Tensor, window_tokens: int, *, window_kv: WindowKV = "replayed") -> Prefixes:
    """Replay each prefix's last tokens for the units that are not stored: what DASC-WR adds to NR (section 4.2).

    Args:
        prefixes: what was loaded (:func:`retain`); they are not changed.
        mask: ``[L, U]`` bool, stored units, which stay as they are.
        window_tokens: ``W_replay`` of eq. 7 before the cap by the prefix; 0 when no unit is omitted.
        window_kv: what replayed tokens attend to in their window, see :class:`~dasc.models.hybrid.Batch`.

    Raises:
        ValueError: for a negative window or a mask of another shape.
    """
    if window_tokens < 0:
        raise ValueError(f"window_tokens must be 0 or more, got {window_tokens}")
    if window_tokens == 0:
        return prefixes
    model, bounds = prefixes.model, prefixes.bounds
    states = StatePool(prefixes.temporal.clone(), prefixes.conv.clone())
    none = torch.empty(0, dtype=torch.int64)
    sequences = [
        SequenceInput(
            tokens=none,
            start=len(tokens),
            state_slot=number,
            kv_slots=torch.arange(bounds[number], bounds[number + 1]),
            window=torch.tensor(tokens[-window_tokens:]),
        )
        for number, tokens in enumerate(prefixes.tokens)
    ]
    for first, end in batches([(s.window_tokens, s.start) for s in sequences]):
        batch = Batch(tuple(sequences[first:end]), global_units=mask, window_kv=window_kv)
        model.forward(batch, states, KVPool(prefixes.kv), all_tokens=True)
    return dataclasses.replace(prefixes, temporal=states.temporal)
