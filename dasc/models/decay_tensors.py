"""Which tensors of a checkpoint hold the decay parameters, and their values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dasc.geometry import StateGeometry
from dasc.models.errors import CheckpointError
from dasc.models.families.family import DECAY_NAMES, DecayName, Family
from dasc.models.gate_parameters import GateParameters
from dasc.models.safetensors_header import TensorEntry

# Exactly representable in FP64.
DECAY_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class DecayKey(NamedTuple):
    """One decay tensor: its block (0-based, of all blocks) and parameter."""

    block: int
    name: DecayName


def find_decay_tensors(
    names: Iterable[str], family: Family, geometry: StateGeometry, *, next_token_blocks: int, where: str
) -> dict[DecayKey, str]:
    """The tensor of each recurrent block's ``A_log`` and ``dt_bias``.

    Args:
        names: of all tensors.
        next_token_blocks: ``num_nextn_predict_layers`` of the config; blocks numbered behind the last one are ignored
            when it is not 0.
        where: the model, for messages.

    Raises:
        CheckpointError: for blocks without decay tensors or with half a pair, for decay tensors of blocks that are not
            recurrent, and for the same one under two names.
    """
    recurrent = set(geometry.recurrent_layers)
    found: dict[DecayKey, str] = {}
    for name in names:
        match = family.match(name)
        if match is None or (match[0] >= geometry.num_blocks and next_token_blocks):
            continue
        key = DecayKey(*match)
        if key.block not in recurrent:
            raise CheckpointError(
                f"{where}: config.json says that the recurrent blocks are {_blocks(recurrent)} of "
                f"{geometry.num_blocks}, found a decay tensor of block {key.block}: {name!r}"
            )
        if key in found:
            raise CheckpointError(
                f"{where}: expected one {key.name} of block {key.block}, found {found[key]!r} and {name!r}"
            )
        found[key] = name
    if not found:
        raise CheckpointError(
            f"{where}: expected decay tensors named layers.N.{family.module}.A_log and .dt_bias, found none"
        )
    for name in DECAY_NAMES:
        missing = {block for block in recurrent if DecayKey(block, name) not in found}
        if missing:
            example = f"layers.{min(missing)}.{family.module}.{name}"
            raise CheckpointError(
                f"{where}: expected {name} for the recurrent blocks {_blocks(recurrent)}, "
                f"found none for {_blocks(missing)}, as {example!r}"
            )
    return found


def _blocks(blocks: Iterable[int]) -> str:
    listed = sorted(blocks)
    return str(listed) if len(listed) <= 12 else f"{str(listed[:6])[:-1]}, ... {listed[-1]}] ({len(listed)})"


def check_entry(entry: TensorEntry, key: DecayKey, family: Family, geometry: StateGeometry, where: str) -> None:
    """Raise unless a decay tensor has a dtype that FP64 holds exactly and a shape of this geometry.

    Raises:
        CheckpointError: with what was expected and found.
    """
    if entry.dtype not in DECAY_DTYPES:
        raise CheckpointError(
            f"{where}: a quantised decay tensor: expected one of {', '.join(DECAY_DTYPES)}, found {entry.dtype}"
        )
    if not family.takes_shape(geometry, key.name, entry.shape):
        raise CheckpointError(
            f"{where}: expected shape {family.shape_text(geometry, key.name)}, found {list(entry.shape)}"
        )


def decode(data: bytes, entry: TensorEntry, key: DecayKey, geometry: StateGeometry, where: str) -> Tensor:
    """Values of a decay tensor in FP64, without rounding.

    Args:
        data: the tensor's own bytes.

    Returns:
        ``[HV]``, or ``[HV, K]`` for KDA's ``dt_bias`` (stored head-major).

    Raises:
        CheckpointError: for NaN or infinity among the values in use.
    """
    heads = geometry.num_value_heads
    values = torch.frombuffer(bytearray(data), dtype=DECAY_DTYPES[entry.dtype]).double()
    if key.name == "A_log":
        values = values[:heads]
    elif geometry.kind == "kda":
        values = values.view(heads, geometry.head_k_dim)
    if not torch.isfinite(values).all():
        bad = int((~torch.isfinite(values)).sum())
        raise CheckpointError(f"{where}: expected finite values, found {bad} NaN or infinite ones")
    return values


def gate_parameters(
    values: Mapping[DecayKey, Tensor], geometry: StateGeometry, lower_bound: float | None
) -> GateParameters:
    """All layers' values in the order of ``geometry.recurrent_layers``."""
    layers = geometry.recurrent_layers
    return GateParameters(
        gate="softplus" if lower_bound is None else "safe",
        lower_bound=lower_bound,
        A_log=torch.stack([values[DecayKey(block, "A_log")] for block in layers]),
        dt_bias=torch.stack([values[DecayKey(block, "dt_bias")] for block in layers]),
    )
