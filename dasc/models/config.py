"""A model's config.json, read key by key: every error names the file, the key, what was expected and what was found."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from dasc.models.errors import CheckpointError

MAX_BLOCKS = 10_000
MAX_CONV_WIDTH = 64


def parse_json(data: bytes, where: str, *, unique_keys: bool = False) -> dict[str, object]:
    """A JSON object.

    Args:
        data: UTF-8 text.
        where: the file, for messages.
        unique_keys: refuse a key given twice; else the last one counts, as usual in JSON.

    Raises:
        CheckpointError: for text that is not JSON, another JSON value than an object, or a key given twice where keys
            must be unique.
    """

    def to_dict(pairs: list[tuple[str, object]]) -> dict[str, object]:
        values = dict(pairs)
        if len(values) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise CheckpointError(f"{where}: the key {twice!r} is given twice")
        return values

    try:
        with _garbage_collection_paused():
            value = json.loads(data.decode("utf-8"), object_pairs_hook=to_dict if unique_keys else None)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: expected JSON, got something else ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Parsed JSON has no cycles, but its many objects would have all others searched for some again and again.

    Threads that pause at the same time leave the collector as the first of them found it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def parse_unique_json(data: bytes, where: str, count_strings: Callable[[dict[str, object]], int]) -> dict[str, object]:
    """:func:`parse_json` with unique keys, at the speed of a parser that lets the last of equal keys win.

    A text without backslashes has two quotes for each string, and a key given twice is a string that the parsed object
    lacks. Only a text whose quotes do not add up is parsed again, key by key.

    Args:
        count_strings: number of strings in the parsed object, keys and values at all depths; may be too low, which
            costs time, never too high.

    Raises:
        CheckpointError: as :func:`parse_json`.
    """
    values = parse_json(data, where)
    if b"\\" in data or data.count(b'"') != 2 * count_strings(values):
        values = parse_json(data, where, unique_keys=True)
    return values


def flat_strings(values: Mapping[str, object]) -> int:
    """Strings of an object, without those of objects and lists in it."""
    return len(values) + list(map(type, values.values())).count(str)


class Config:
    """A JSON object of a config.json.

    A key that holds ``null`` counts as absent, as transformers' classes treat it.
    """

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self._values = values
        self.where = where

    def error(self, key: str, expected: str) -> CheckpointError:
        """The error to raise for a key: what was expected and what is there."""
        found = repr(self._values[key])[:200] if key in self._values else "nothing"
        return CheckpointError(f"{self.where}: {key} must be {expected}, found {found}")

    def has(self, key: str) -> bool:
        """Whether the key is present and not ``null``."""
        return self._values.get(key) is not None

    def given(self, key: str) -> bool:
        """Whether the key is present, be it as ``null``."""
        return key in self._values

    def is_empty(self) -> bool:
        return not self._values

    def section(self, key: str) -> Config | None:
        """The object under ``key``, or ``None`` when absent."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, "an object")
        return Config(value, f"{self.where}: {key}")

    def integer(self, key: str, *, minimum: int = 1) -> int:
        value = self._values.get(key)
        if type(value) is not int or value < minimum:
            raise self.error(key, f"an integer of at least {minimum}")
        return value

    def integer_or(self, key: str, default: int, *, minimum: int = 1) -> int:
        return self.integer(key, minimum=minimum) if self.has(key) else default

    def number(self, key: str) -> float:
        value = self._values.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > sys.float_info.max:
            raise self.error(key, "a finite number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self._values.get(key)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def text(self, key: str) -> str:
        value = self._values.get(key)
        if not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def strings(self, key: str) -> list[str]:
        value = self._values.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, "a list of strings")
        return value

    def integers(self, key: str) -> list[int]:
        value = self._values.get(key)
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self.error(key, "a list of integers")
        return value

    def string_map(self, key: str) -> dict[str, str]:
        value = self._values.get(key)
        if not isinstance(value, dict) or not set(map(type, value.values())) <= {str}:
            raise CheckpointError(f"{self.where}: {key} must be an object of strings, found something else")
        return value

    def is_integer(self, key: str) -> bool:
        return type(self._values.get(key)) is int

    def num_blocks(self) -> int:
        """``num_hidden_layers``, all blocks of the model."""
        blocks = self.integer("num_hidden_layers")
        if blocks > MAX_BLOCKS:
            raise self.error("num_hidden_layers", f"at most {MAX_BLOCKS}")
        return blocks

    def conv_width(self, key: str) -> int:
        """Taps of the short convolution."""
        width = self.integer(key)
        if width > MAX_CONV_WIDTH:
            raise self.error(key, f"the width of a short convolution, at most {MAX_CONV_WIDTH}")
        return width


def quantization_method(config: Config) -> str | None:
    """Name of the weights' quantisation method, from a config.json.

    Read from ``quantization_config`` or ``compression_config``, at the top or in ``text_config``. ``"unnamed"`` when
    there is such a section without a name; ``None`` when there is none, or only an empty one.
    """
    text = config.section("text_config")
    for place in (config, text):
        for key in ("quantization_config", "compression_config"):
            section = place.section(key) if place is not None else None
            if section is not None and not section.is_empty():
                name = next((name for name in ("quant_method", "quant_algo") if section.has(name)), None)
                return section.text(name) if name is not None else "unnamed"
    return None


def modelopt_method(config: Config) -> str | None:
    """The same from ModelOpt's hf_quant_config.json: ``quant_algo`` of ``quantization``; null when weights are not."""
    section = config.section("quantization") or config
    return section.text("quant_algo") if section.has("quant_algo") else None
