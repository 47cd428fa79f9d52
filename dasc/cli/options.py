"""Option types, and options, that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from dasc.units import parse_bytes

_Command = TypeVar("_Command", bound=Callable[..., Any])
Decorator = Callable[[_Command], _Command]

DEFAULT_MODEL = "kda"
"""The bundled model that commands take when none is named."""

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


def together(*options: Decorator[Any]) -> Decorator[Any]:
    """Options as one decorator, in the order in which ``--help`` lists them."""

    def decorate(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


gate_input_option = click.option(
    "--a-s", "gate_input", type=float, help="Representative gate input; the family's own by default."
)
threads_option = click.option(
    "--threads", type=click.IntRange(1, 256), default=1, show_default=True, help="Of torch; small models gain by one."
)


def task_options(*, length: int, count: int) -> Decorator[Any]:
    """Which examples of the bundled models' tasks are asked: ``tasks``, ``length``, ``count``, ``questions``, ``seed``.

    Args:
        length: default.
        count: default.
    """
    positive = click.IntRange(min=1)
    return together(
        click.option("--tasks", type=NameList(), help="Tasks, with commas between them; by default all that fit."),
        click.option(
            "--length", type=positive, default=length, show_default=True, help="Tokens of an example and its questions."
        ),
        click.option("--count", type=positive, default=count, show_default=True, help="Examples of each task."),
        click.option("--questions", type=positive, default=4, show_default=True, help="Asked of an example, at most."),
        click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the examples."),
    )


def result_options(files: str, printed: str = "a table", *, resumes: bool = False) -> Decorator[Any]:
    """Where a result goes: ``output`` and ``as_json``.

    Args:
        files: what the folder of ``-o`` is for.
        printed: without ``--json``.
        resumes: the folder holds what was finished before an interruption.
    """
    goes_on = "; an interrupted run goes on from the same folder" if resumes else ""
    return together(
        click.option(
            "-o", "--output", type=click.Path(path_type=Path, file_okay=False), help=f"Folder for {files}{goes_on}."
        ),
        click.option("--json", "as_json", is_flag=True, help=f"Print JSON instead of {printed}."),
    )
