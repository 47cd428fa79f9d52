"""What figures depend on besides the settings of their measurement."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dasc import __version__


def folder_sha256(folder: Path) -> str:
    """Of a model's configuration, tokenizer and weights: names and bytes of its JSON and safetensors files."""
    total = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.suffix in (".json", ".safetensors")):
        with open(path, "rb") as file:
            total.update(f"{path.name}\0{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return total.hexdigest()


def versions() -> dict[str, str]:
    """Of what measurements may depend on."""
    return {"dasc": __version__, **{name: importlib.metadata.version(name) for name in ("torch", "numpy")}}


def described(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a measurement with the model's name and fingerprint before them, and versions after."""
    return {"model": folder.name, "model_sha256": folder_sha256(folder), **settings, "versions": versions()}
