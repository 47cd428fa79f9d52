"""A tiny model with a byte vocabulary, and replays of it that take a second."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import dasc.reference
from dasc.eval.chat_tokens import ByteTokens
from dasc.eval.conversations import Limits, Turn, conversation_turns, generate_conversations
from dasc.eval.replay_arms import Serving
from dasc.eval.served_model import ServedModel, load_served, state_dtypes
from dasc.models.hybrid import random_hybrid, save_hybrid


def save_tiny_model(
    folder: Path,
    kind: str = "kda",
    gate: str = "softplus",
    vocab_size: int = ByteTokens.vocabulary,
    horizons_tokens: tuple[float, float] = (1.0, 64.0),
) -> None:
    config, weights = random_hybrid(
        kind,
        gate,
        seed=5,
        vocab_size=vocab_size,
        hidden_size=16,
        num_blocks=3,
        attention_period=3,
        num_value_heads=4 if kind == "gdn" else 2,
        num_key_heads=2,
        head_v_dim=16,
        head_k_dim=16,
        horizons_tokens=horizons_tokens,
    )
    save_hybrid(folder, config, weights)


@cache
def tiny_served(kind: str = "kda", ops: ModuleType = dasc.reference, **options) -> ServedModel:
    with TemporaryDirectory() as folder:
        save_tiny_model(Path(folder), kind, **options)
        return load_served(Path(folder), ops)


@cache
def tiny_chats(count: int = 8, turns: int = 3) -> list[list[Turn]]:
    chats = generate_conversations(count, turns=turns, scale=1 / 256, seed=2)
    return [conversation_turns(chat, ByteTokens(), Limits(turns=turns), 260) for chat in chats]


def dense_slot_bytes(served: ServedModel) -> int:
    return served.model.config.geometry.dense_bytes(state_dtypes(served.model))


def tiny_serving(served: ServedModel, dense_slots: int = 18, **options) -> Serving:
    settings = {"kv_tokens": 2000, "server_limit": 2, "prefill_tokens": 16, **options}
    return Serving(memory_bytes=dense_slots * dense_slot_bytes(served), **settings)
