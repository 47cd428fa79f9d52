"""Sizes in bytes as people write them."""

from __future__ import annotations

import re
from fractions import Fraction

_MAX_BYTES = 1 << 60
_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("kmgtp", start=1)
    for suffix, base in (("ib", 1024), ("b", 1000))
}


def parse_bytes(text: str) -> int:
    """``"8GiB"``, ``"500MB"`` or ``"1048576"`` to a number of bytes, 1 to 2**60.

    Raises:
        ValueError: saying what was expected and what came.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(f"expected a size such as 8GiB, 500MB or 1048576, got {text!r}")
    size = int(Fraction(match[1]) * _UNITS[match[2].lower()])
    if not 1 <= size <= _MAX_BYTES:
        raise ValueError(f"expected a size from 1 byte to 1024 PiB, got {text!r}")
    return size


def format_bytes(size: float) -> str:
    """``75497472`` -> ``"72.00 MiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"
