"""What a command leaves on disk: all of its files or none."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_together(folder: Path, contents: Mapping[str, bytes]) -> list[Path]:
    """Write files into ``folder``, which is made if it does not exist. A failure to write leaves what was there.

    Every file is first written under another name; only when all are on disk do they take their names, one after the
    other. Symbolic links are followed, and nothing but regular files is replaced.

    Returns:
        Their paths.

    Raises:
        OSError: when a file cannot be written.
    """
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / name for name in contents]
    targets = [Path(os.path.realpath(path)) for path in paths]
    for path, target in zip(paths, targets, strict=True):
        if target.exists() and not target.is_file():
            raise FileExistsError(errno.EEXIST, "not a regular file", str(path))
    suffix = f".{secrets.token_hex(8)}.tmp"
    temporary = [target.with_name(f".{target.name}{suffix}") for target in targets]
    try:
        for path, data in zip(temporary, contents.values(), strict=True):
            with open(path, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        for path, target in zip(temporary, targets, strict=True):
            os.replace(path, target)
    except BaseException:
        for path in temporary:
            path.unlink(missing_ok=True)
        if made:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
    return paths


def json_bytes(value: Mapping[str, Any], indent: int | None = 2) -> bytes:
    """JSON text in UTF-8, with a line break at its end."""
    return (json.dumps(value, indent=indent) + "\n").encode()
