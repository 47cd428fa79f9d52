"""Finished blocks in a file of JSON lines, so that an interrupted run goes on where it was.

The first line holds the settings, each other one an arm's own settings or a finished block.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dasc.eval.quality.protocol import BlockResult

UNITS_FILE = "units.jsonl"


class UnitLog:
    """The blocks that a run has finished, in memory and, with a path, on disk.

    A last line that was cut short by an interruption is dropped.

    Attributes:
        arms: settings of the arms begun, by label; for reading.
        blocks: finished blocks by arm, task and number; for reading.

    Args:
        settings: plain JSON values: all that the blocks depend on.
        path: of the file, made with its folder if it does not exist; ``None`` for no file.

    Raises:
        ValueError: for a file of other settings, naming one that differs, or no such file at all.
        OSError: when it cannot be read or written.
    """

    def __init__(self, settings: Mapping[str, Any], path: Path | None = None) -> None:
        self._path = path
        self.arms: dict[str, dict[str, Any]] = {}
        self.blocks: dict[tuple[str, str, int], BlockResult] = {}
        plain: dict[str, Any] = json.loads(json.dumps(settings))
        if path is None:
            return
        lines = _complete_lines(path) if path.exists() else []
        if not lines:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
            self._write({"settings": plain})
            return
        try:
            self._read(lines, plain)
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path}: not a file of finished blocks ({error})") from error

    def _read(self, lines: list[bytes], settings: dict[str, Any]) -> None:
        known = json.loads(lines[0])["settings"]
        _check_same(str(self._path), known, settings)
        for line in lines[1:]:
            values = json.loads(line)
            if "arm_settings" in values:
                self.arms[values["arm"]] = values["arm_settings"]
            else:
                self._keep(BlockResult.from_dict(values["block"]))

    def _keep(self, block: BlockResult) -> None:
        self.blocks[block.arm, block.task, block.number] = block

    def add_arm(self, label: str, settings: Mapping[str, Any]) -> None:
        """Note an arm's settings before its first block.

        Raises:
            ValueError: when the arm was begun with others.
        """
        plain: dict[str, Any] = json.loads(json.dumps(settings))
        known = self.arms.setdefault(label, plain)
        _check_same(f"arm {label!r}", known, plain)
        self._write({"arm": label, "arm_settings": plain})

    def add_block(self, block: BlockResult) -> None:
        """Keep a finished block."""
        self._keep(block)
        self._write({"block": block.as_dict()})

    def _write(self, values: Mapping[str, Any]) -> None:
        if self._path is None:
            return
        with open(self._path, "ab") as file:
            file.write(json.dumps(values).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def _complete_lines(path: Path) -> list[bytes]:
    """The lines that end in a line break; what follows the last one is cut off the file."""
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        os.truncate(path, end)
    return data[:end].splitlines()


def _check_same(what: str, known: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for name in sorted({*known, *now}):
        if known.get(name) != now.get(name):
            raise ValueError(
                f"{what} cannot be resumed: {name} was {_short(known.get(name))} and is now {_short(now.get(name))}; "
                "take another output folder"
            )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
