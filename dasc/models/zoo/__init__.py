"""Small trained hybrids, bundled. Each folder holds the model, how it was trained, and the log of its training."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path(__file__).parent
MODELS = ("kda", "kda-safe", "gdn")
"""KDA with the softplus gate, KDA with the safe gate, GDN with the softplus gate."""


def model_folder(name: str | Path) -> Path:
    """The folder of a bundled model by its name; any other ``name`` is taken for a folder itself."""
    return _ROOT / name if str(name) in MODELS else Path(name)
