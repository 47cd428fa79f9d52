"""Finished units of a long measurement in a file of JSON lines, so that an interrupted run goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_LONGEST_VALUE = 60


class UnitFile:
    """JSON values by name; the first line of the file holds the settings that all of them depend on.

    A last line that was cut short by an interruption is dropped.

    Args:
        path: of the file, made with its folder if it does not exist; ``None`` keeps units in memory only.
        settings: plain JSON values.

    Raises:
        ValueError: for a file of other settings, naming one that differs, or no such file at all.
        OSError: when it cannot be read or written.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self._path = path
        self._units: dict[str, Any] = {}
        if path is None:
            return
        lines = _complete_lines(path) if path.exists() else []
        if not lines:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._append(_plain(settings))
            return
        try:
            known: dict[str, Any] = json.loads(lines[0])
            if not isinstance(known, dict):
                raise TypeError("its first line holds no settings")
            self._units = dict(json.loads(line) for line in lines[1:])
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} is no file of finished units: {error}") from error
        check_unchanged(str(path), known, settings)

    def __contains__(self, name: str) -> bool:
        return name in self._units

    def __getitem__(self, name: str) -> Any:
        return self._units[name]

    def get(self, name: str, compute: Callable[[], Any]) -> Any:
        """The unit of this name, computed and written if it is not there yet; plain JSON values either way."""
        return self._units[name] if name in self._units else self.keep(name, compute())

    def keep(self, name: str, value: Any) -> Any:
        """The unit of this name: ``value``, which is written, unless there is one."""
        if name not in self._units:
            self._units[name] = _plain(value)
            if self._path is not None:
                self._append([name, self._units[name]])
        return self._units[name]

    def _append(self, value: Any) -> None:
        assert self._path is not None
        with open(self._path, "ab") as file:
            file.write(json.dumps(value).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def check_unchanged(what: str, known: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse to go on with ``what``, begun with the settings ``known``.

    Raises:
        ValueError: naming the first setting that differs.
    """
    now = _plain(now)
    for name in sorted({*known, *now}):
        if known.get(name) != now.get(name):
            raise ValueError(
                f"{what} cannot be resumed: {name} was {_short(known.get(name))} and is now {_short(now.get(name))}; "
                "take another output folder"
            )


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    return json.loads(json.dumps(value))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def _complete_lines(path: Path) -> list[bytes]:
    """Lines that end in a line break; what follows the last one is cut off the file."""
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        os.truncate(path, end)
    return data[:end].splitlines()
