"""Folders of small hybrids of random weights that have the tasks' token ids."""

from pathlib import Path

from dasc.models.tasks import VOCABULARY
from tests.eval.replay_runs import save_tiny_model


def save_task_model(folder: Path, kind: str = "kda", gate: str = "softplus", vocab_size: int = VOCABULARY) -> Path:
    save_tiny_model(folder, kind, gate, vocab_size, horizons_tokens=(2.0, 300.0))
    return folder
