"""Option types and formats that several commands share."""

from __future__ import annotations

import click

from dasc.units import parse_bytes

MAX_TOKENS = 1 << 40
"""Larger cutoffs are a slip of the hand."""


class ByteSize(click.ParamType):  # type: ignore[type-arg]  # generic only in newer clicks
    """``8GiB``, ``500MB`` or a plain number of bytes."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse to a positive number of bytes; a usage error says what is expected."""
        if isinstance(value, int):
            return value
        try:
            return parse_bytes(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


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


class NameList(click.ParamType):  # type: ignore[type-arg]
    """Names with commas between them; repeats are dropped. Which names there are is for the library to say."""

    name = "names"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        """Parse to a tuple in the order given."""
        if isinstance(value, tuple):
            return value
        return tuple(dict.fromkeys(part.strip() for part in str(value).split(",")))
