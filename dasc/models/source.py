"""Where a model's files are read from: byte ranges of named files, in a folder here or on the Hub."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from dasc.models.errors import CheckpointError


class Source(Protocol):
    """A model's files. Reads are exact: less than was asked for is an error.

    Attributes:
        name: of the model, for messages and :class:`~dasc.models.checkpoint.Checkpoint`.
        requests: reads made so far.
        first_bytes: how much of a .safetensors file to read before its header's length is known.
        gap_bytes: unwanted bytes between two ranges that are cheaper to read than to ask twice.
        parallel: files to read at once.
    """

    name: str
    requests: int
    first_bytes: int
    gap_bytes: int
    parallel: int

    def files(self) -> list[str]:
        """Names of the model's files, sorted; those in folders below have a ``/``."""

    def read_all(self, file: str, max_bytes: int) -> bytes:
        """A small file as a whole; more than ``max_bytes`` is an error."""

    def read_start(self, file: str, length: int) -> tuple[bytes, int]:
        """The first ``length`` bytes (all, if the file is shorter) and the file's size."""

    def read_range(self, file: str, start: int, end: int) -> bytes:
        """Bytes ``[start, end)``."""


def listing(files: Sequence[str]) -> str:
    """Some of the files' names, for messages."""
    more = f" and {len(files) - 8} more files" if len(files) > 8 else ""
    return ", ".join(files[:8]) + more or "no files"


class FolderSource:
    """A folder on this machine, read with plain unbuffered reads."""

    first_bytes = 8
    gap_bytes = 0
    parallel = 1

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            what = "a file" if folder.exists() else "nothing"
            raise CheckpointError(f"{folder}: expected a model's folder, found {what}")
        self.name = str(folder)
        self.requests = 0
        self._folder = folder

    def files(self) -> list[str]:
        try:
            return sorted(entry.name for entry in self._folder.iterdir() if entry.is_file())
        except OSError as error:
            raise self._error(".", error) from error

    def read_all(self, file: str, max_bytes: int) -> bytes:
        data, size = self.read_start(file, max_bytes)
        if size > max_bytes:
            raise CheckpointError(f"{self.name}/{file}: expected at most {max_bytes} bytes, found {size}")
        return data

    def read_start(self, file: str, length: int) -> tuple[bytes, int]:
        try:
            size = (self._folder / file).stat().st_size
        except OSError as error:
            raise self._error(file, error) from error
        return self.read_range(file, 0, min(length, size)), size

    def read_range(self, file: str, start: int, end: int) -> bytes:
        self.requests += 1
        try:
            with open(self._folder / file, "rb", buffering=0) as stream:
                data = os.pread(stream.fileno(), end - start, start)
        except OSError as error:
            raise self._error(file, error) from error
        if len(data) != end - start:
            raise CheckpointError(
                f"{self.name}/{file}: expected {end - start} bytes at byte {start}, found {len(data)}; "
                "the file is truncated or changed while it was read"
            )
        return data

    def _error(self, file: str, error: OSError) -> CheckpointError:
        return CheckpointError(f"{self.name}/{file}: cannot be read: {error.strerror}")
