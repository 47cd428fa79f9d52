"""What a command leaves on disk: figures and numbers, all of them or none."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


def figure_bytes(name: str, figure: Figure) -> dict[str, bytes]:
    """``<name>.png`` and ``<name>.svg`` of a figure."""
    files = {}
    for suffix in ("png", "svg"):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=suffix, dpi=160, bbox_inches="tight")
        files[f"{name}.{suffix}"] = buffer.getvalue()
    return files
