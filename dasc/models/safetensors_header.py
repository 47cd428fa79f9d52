"""The header of a .safetensors file: where each tensor lies. Nothing in it is believed before it is checked.

A file is an 8-byte little-endian length, a JSON header of that length, then the tensors one after another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeGuard

from dasc.models.config import parse_json
from dasc.models.errors import CheckpointError

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the format's own limit

_DTYPE_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: dtype as the format names it, shape, and its byte range ``[start, end)`` in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def header_length(prefix: bytes, file_bytes: int, where: str) -> int:
    """Bytes of the JSON header, from a file's first 8 bytes.

    Raises:
        CheckpointError: for a file too short, or a length beyond the file or the format's limit.
    """
    if file_bytes < LENGTH_BYTES or len(prefix) < LENGTH_BYTES:
        raise CheckpointError(f"{where}: expected a safetensors file, found only {file_bytes} bytes")
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{where}: expected a safetensors header of at most {MAX_HEADER_BYTES} bytes, found a length of {length}"
        )
    if LENGTH_BYTES + length > file_bytes:
        raise CheckpointError(
            f"{where}: the safetensors header of {length} bytes reaches beyond the file's {file_bytes} bytes; "
            "the file is truncated or no safetensors file"
        )
    return length


def parse_header(header: bytes, file_bytes: int, where: str) -> dict[str, TensorEntry]:
    """All tensors of a file.

    Args:
        header: the JSON header alone.
        file_bytes: size of the whole file.
        where: the file, for messages.

    Raises:
        CheckpointError: for a header that is not JSON, names a tensor twice, or does not describe the rest of the file
            exactly: sizes other than dtype and shape give, tensors that overlap, leave gaps or reach beyond the file.
    """
    values = parse_json(header, where, unique_keys=True)
    data_start = LENGTH_BYTES + len(header)
    entries = {
        name: _entry(value, data_start, f"{where}: tensor {name!r}")
        for name, value in values.items()
        if name != "__metadata__"
    }
    position = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.end > file_bytes:
            raise CheckpointError(
                f"{where}: tensor {name!r} ends at byte {entry.end}, beyond the file's {file_bytes} bytes; "
                "the file is truncated"
            )
        if entry.start != position:
            raise CheckpointError(
                f"{where}: tensor {name!r} was expected at byte {position}, where the one before it ends, "
                f"found at {entry.start}"
            )
        position = entry.end
    if position != file_bytes:
        raise CheckpointError(f"{where}: the tensors end at byte {position}, the file at {file_bytes}")
    return entries


def _entry(value: object, data_start: int, where: str) -> TensorEntry:
    """One checked entry; offsets of the header count from ``data_start``."""
    fields = value if isinstance(value, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where}: expected a dtype, a shape and two data_offsets, found {value!r}"[:500])
    start, end = offsets
    if dtype in _DTYPE_BITS:
        bits = math.prod(shape) * _DTYPE_BITS[dtype]
        if bits != 8 * (end - start):
            raise CheckpointError(
                f"{where}: expected {bits / 8:g} bytes for {dtype} {list(shape)}, found data_offsets {list(offsets)}"
            )
    elif start > end:
        raise CheckpointError(f"{where}: data_offsets {list(offsets)} run backwards")
    return TensorEntry(dtype, tuple(shape), data_start + start, data_start + end)


def _naturals(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and len(value) <= 64 and all(type(n) is int and 0 <= n < 2**63 for n in value)


def spans(entries: list[TensorEntry], gap_bytes: int) -> Iterator[tuple[int, int]]:
    """Byte ranges ``[start, end)`` that cover the entries; neighbours at most ``gap_bytes`` apart are one range."""
    ordered = sorted(entries, key=lambda entry: entry.start)
    start, end = ordered[0].start, ordered[0].end
    for entry in ordered[1:]:
        if entry.start - end > gap_bytes:
            yield start, end
            start = entry.start
        end = max(end, entry.end)
    yield start, end
