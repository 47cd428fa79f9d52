"""What the engines are asked: the same for every configuration, so that their answers can be compared."""

from __future__ import annotations

import numpy as np

from tests.sglang.engines import Conversations, Flush, Observe, Step, Turn
from tests.sglang.tiny_models import VOCAB

SLOTS = 24
"""States that a dense server can hold, running ones included."""


def _tokens(rng: np.random.Generator, count: int) -> list[int]:
    return rng.integers(3, VOCAB, count).tolist()


def conversations() -> list[list[Turn]]:
    """Three conversations of three turns, all of whose states fit; the whole distribution is asked for."""
    rng = np.random.default_rng(7)
    return [
        [Turn(_tokens(rng, n), 6, top_logprobs=VOCAB) for n in lengths]
        for lengths in ((70, 5, 1), (33, 40, 9), (3, 2, 64))
    ]


def frozen_prompts() -> list[list[Turn]]:
    """Sixteen documents read further and further in turns, one state each time: more states than fit."""
    rng = np.random.default_rng(8)
    documents = [_tokens(rng, 60) for _ in range(16)]
    return [[Turn(document[:end], new_tokens=1)] for end in (20, 33, 46, 59) for document in documents]


def load() -> list[list[Turn]]:
    """Sixty conversations of three turns with four shared starts; every fifth is aborted in its last turn."""
    rng = np.random.default_rng(9)
    starts = [_tokens(rng, 16) for _ in range(4)]
    talks = []
    for number in range(60):
        turns = [Turn(starts[number % 4] + _tokens(rng, 8), 4, top_logprobs=2)]
        turns += [Turn(_tokens(rng, 6), 4, top_logprobs=2) for _ in range(2)]
        if number % 5 == 4:
            turns[-1] = Turn(turns[-1].tokens, 40, abort_after=number % 3)
        talks.append(turns)
    return talks


def cold(prompts: list[list[int]]) -> list[Step]:
    """Each prompt on an empty cache."""
    return [step for prompt in prompts for step in (Flush(), Conversations([[Turn(prompt, 6)]]))]


def phases() -> list[Step]:
    """What every engine goes through: talk, talk at once, read, serve a load. Each phase starts with nothing cached."""
    return [
        Conversations(conversations()),
        Flush(),
        Conversations(conversations(), concurrency=3),
        Flush(),
        Conversations(frozen_prompts()),
        Flush(),
        Conversations(load(), concurrency=8),
        Observe(),
        Flush(),
        Observe(),
    ]
