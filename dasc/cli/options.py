"""Option types and formats that several commands share."""

from __future__ import annotations

import re
from fractions import Fraction

import click

MAX_TOKENS = 1 << 40
"""Larger cutoffs are a slip of the hand."""
_MAX_BYTES = 1 << 60
_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGTP", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}


class ByteSize(click.ParamType):  # type: ignore[type-arg]  # generic only in newer clicks
    """``8GiB``, ``500MB`` or a plain number of bytes."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse to a positive number of bytes; a usage error says what is expected."""
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(value))
        by_name = {name.lower(): size for name, size in _UNITS.items()}
        if match is None or match[2].lower() not in by_name:
            self.fail(f"expected a size such as 8GiB, 500MB or 1048576, got {value!r}", param, ctx)
        size = int(Fraction(match[1]) * by_name[match[2].lower()])
        if not 1 <= size <= _MAX_BYTES:
            self.fail(f"expected a size from 1 byte to 1024 PiB, got {value!r}", param, ctx)
        return size


class IntList(click.ParamType):  # type: ignore[type-arg]
    """Whole numbers with commas between them, each at least ``minimum``; repeats are dropped."""

    name = "list"

    def __init__(self, minimum: int = 1) -> None:
        self.minimum = minimum

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Parse to a tuple in the order given."""
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(dict.fromkeys(int(part) for part in str(value).split(",")))
        except ValueError:
            self.fail(f"expected whole numbers with commas between them, got {value!r}", param, ctx)
        if not self.minimum <= min(numbers) <= max(numbers) <= MAX_TOKENS:
            self.fail(f"expected numbers from {self.minimum} to {MAX_TOKENS}, got {value!r}", param, ctx)
        return numbers


def format_bytes(size: float) -> str:
    """``75497472`` -> ``"72.00 MiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"
