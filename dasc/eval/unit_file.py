"""Finished units of a long measurement in a file of JSON lines, so that an interrupted run goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class UnitFile:
    """JSON values by name; the first line of the file holds the settings that all of them depend on.

    A last line that was cut short by an interruption is dropped.

    Args:
        path: of the file, whose folder exists; ``None`` keeps units in memory only.
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
        settings = json.loads(json.dumps(settings))
        lines = _complete_lines(path) if path.exists() else []
        if not lines:
            self._append(settings)
            return
        try:
            known = json.loads(lines[0])
            self._units = dict(json.loads(line) for line in lines[1:])
            differing = sorted(name for name in {*known, *settings} if known.get(name) != settings.get(name))
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"{path} is no file of finished units: {error}") from error
        if differing:
            name = differing[0]
            raise ValueError(
                f"{path} cannot be resumed: {name} was {known.get(name)!r} and is now {settings.get(name)!r}; "
                "take another output folder"
            )

    def get(self, name: str, compute: Callable[[], Any]) -> Any:
        """The unit of this name, computed and written if it is not there yet; plain JSON values either way."""
        if name not in self._units:
            self._units[name] = json.loads(json.dumps(compute()))
            if self._path is not None:
                self._append([name, self._units[name]])
        return self._units[name]

    def _append(self, value: Any) -> None:
        assert self._path is not None
        with open(self._path, "ab") as file:
            file.write(json.dumps(value).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _complete_lines(path: Path) -> list[bytes]:
    """Lines that end in a line break; what follows the last one is cut off the file."""
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        os.truncate(path, end)
    return data[:end].splitlines()
