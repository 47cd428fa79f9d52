"""Small trained hybrids, bundled. Each folder holds the model, how it was trained, and the log of its training."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path(__file__).parent
MODELS = ("kda", "kda-safe", "gdn")
"""KDA with the softplus gate, KDA with the safe gate, GDN with the softplus gate."""

SPECIALISTS = ("gdn-tracking", "kda-text")
"""Trained on some of the tasks only: a GDN whose beta reaches 2 on tracking and aggregation, KDA on text."""


def model_folder(name: str | Path) -> Path:
    """The folder of a bundled model by its name; any other ``name`` is taken for a folder itself.

    Raises:
        ValueError: for a bundled model whose weights are not there.
    """
    if str(name) not in (*MODELS, *SPECIALISTS):
        return Path(name)
    folder = _ROOT / name
    if not folder.is_dir():
        raise ValueError(
            f"the weights of {name} are not bundled yet: train it by python -m dasc.models.train {name} -o FOLDER, "
            "and name FOLDER/model in its place"
        )
    return folder
