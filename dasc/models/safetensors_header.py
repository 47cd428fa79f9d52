"""The header of a .safetensors file: where each tensor lies. Nothing in it is believed before it is checked.

A file is an 8-byte little-endian length, a JSON header of that length, then the tensors one after another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain
from operator import mul
from typing import Any, TypeGuard

from dasc.models.config import flat_strings, parse_unique_json
from dasc.models.errors import CheckpointError

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_NUMBERS = 64  # of a shape
_METADATA = "__metadata__"
_FIELDS = ("dtype", "shape", "data_offsets")

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


class Header(Mapping[str, TensorEntry]):
    """The checked tensors of a file, by name. Entries are made when asked for: a file may hold a million tensors."""

    def __init__(self, tensors: dict[str, Any], data_start: int) -> None:
        self._tensors = tensors
        self._data_start = data_start

    def __getitem__(self, name: str) -> TensorEntry:
        dtype, shape, (start, end) = (self._tensors[name][field] for field in _FIELDS)
        return TensorEntry(dtype, tuple(shape), self._data_start + start, self._data_start + end)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def parse_header(header: bytes, file_bytes: int, where: str) -> Header:
    """All tensors of a file.

    Args:
        header: the JSON header alone.
        file_bytes: size of the whole file.
        where: the file, for messages.

    Raises:
        CheckpointError: for a header that is not JSON, names a tensor twice, or does not describe the rest of the file
            exactly: sizes other than dtype and shape give, tensors that overlap, leave gaps or reach beyond the file.
    """
    tensors: dict[str, Any] = parse_unique_json(header, where, _count_strings)
    tensors.pop(_METADATA, None)
    data_start = LENGTH_BYTES + len(header)
    if not _all_valid(tensors):
        for name, value in tensors.items():
            _check_tensor(value, f"{where}: tensor {name!r}")
    ordered = sorted([value["data_offsets"] for value in tensors.values()])
    if [start for start, _ in ordered] + [file_bytes - data_start] != [0] + [end for _, end in ordered]:
        raise _position_error(Header(tensors, data_start), data_start, file_bytes, where)
    return Header(tensors, data_start)


def _count_strings(values: dict[str, object]) -> int:
    """Strings of a header: names, keys and dtypes of tensors, keys and values of metadata."""
    metadata = values.get(_METADATA)
    tensors = [value for name, value in values.items() if isinstance(value, dict) and name != _METADATA]
    dtypes = [value.get("dtype") for value in tensors]
    in_metadata = flat_strings(metadata) if isinstance(metadata, dict) else 0
    return len(values) + sum(map(len, tensors)) + list(map(type, dtypes)).count(str) + in_metadata


def _all_valid(tensors: dict[str, Any]) -> bool:
    """Whether :func:`_check_tensor` accepts every tensor, known without a Python call for each.

    False also for dtypes that are not known.
    """
    values = tensors.values()
    if not values:
        return True
    if set(map(type, values)) != {dict}:
        return False
    try:
        dtypes, shapes, offsets = ([value[field] for value in values] for field in _FIELDS)
    except KeyError:
        return False
    if set(map(type, dtypes)) != {str} or not set(dtypes) <= _DTYPE_BITS.keys():
        return False
    if set(map(type, shapes)) != {list} or set(map(type, offsets)) != {list}:
        return False
    numbers = list(chain.from_iterable(chain(shapes, offsets)))
    if set(map(type, numbers)) != {int} or not 0 <= min(numbers) <= max(numbers) < 2**63:
        return False
    if max(map(len, shapes)) > _MAX_NUMBERS or set(map(len, offsets)) != {2}:
        return False
    bits = list(map(mul, map(math.prod, shapes), map(_DTYPE_BITS.__getitem__, dtypes)))
    return bits == [8 * (end - start) for start, end in offsets]


def _check_tensor(value: object, where: str) -> None:
    """Raise unless a tensor has a dtype, a shape, and as many bytes as these say."""
    fields = value if isinstance(value, dict) else {}
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{where}: expected a dtype, a shape and two data_offsets, found {value!r}"[:500])
    start, end = offsets
    if dtype in _DTYPE_BITS:
        bits = math.prod(shape) * _DTYPE_BITS[dtype]
        if bits != 8 * (end - start):
            expected = Decimal(bits) / 8  # a float may not hold it
            raise CheckpointError(
                f"{where}: expected {expected:g} bytes for {dtype} {shape}, found data_offsets {offsets}"
            )
    elif start > end:
        raise CheckpointError(f"{where}: data_offsets {offsets} run backwards")


def _position_error(entries: Header, data_start: int, file_bytes: int, where: str) -> CheckpointError:
    """Where tensors first fail to fill the file from ``data_start`` on without gap or overlap."""
    position = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.end > file_bytes:
            return CheckpointError(
                f"{where}: tensor {name!r} ends at byte {entry.end}, beyond the file's {file_bytes} bytes; "
                "the file is truncated"
            )
        if entry.start != position:
            return CheckpointError(
                f"{where}: tensor {name!r} was expected at byte {position}, where the one before it ends, "
                f"found at {entry.start}"
            )
        position = entry.end
    return CheckpointError(f"{where}: the tensors end at byte {position}, the file at {file_bytes}")


def _naturals(value: object) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and len(value) <= _MAX_NUMBERS
        and all(type(number) is int and 0 <= number < 2**63 for number in value)
    )


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
