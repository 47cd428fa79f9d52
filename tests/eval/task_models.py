"""Folders of small hybrids of random weights that have the tasks' token ids."""

from pathlib import Path

from dasc.models.hybrid import random_hybrid, save_hybrid
from dasc.models.tasks import VOCABULARY


def save_task_model(folder: Path, kind: str = "kda", gate: str = "softplus", vocab_size: int = VOCABULARY) -> Path:
    config, weights = random_hybrid(
        kind,
        gate,
        seed=5,
        vocab_size=vocab_size,
        hidden_size=32,
        num_blocks=3,
        attention_period=3,
        num_value_heads=2,
        head_v_dim=8,
        head_k_dim=8,
        horizons_tokens=(2.0, 300.0),
    )
    save_hybrid(folder, config, weights)
    return folder
