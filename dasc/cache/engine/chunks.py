"""Which tokens of which request go into the next forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from dasc.cache.engine.request import Running


@dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive tokens of one request.

    Attributes:
        running: the request.
        start: position of the first, which is how many tokens its state has seen.
        end: position after the last.
        stops: a checkpoint is due at ``end``.
        prefill: they belong to the prompt, rather than being one token to decode from.
    """

    running: Running
    start: int
    end: int
    stops: bool
    prefill: bool

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def complete(self) -> bool:
        """All known tokens are computed after it: its last logits are those of a new token."""
        return self.end == self.running.lease.num_tokens

    @property
    def pairs(self) -> int:
        """Query-key pairs of one attention layer, those of the replay window included."""
        window = self.running.window_tokens
        own = self.tokens * self.start + self.tokens * (self.tokens + 1) // 2
        return own + window * (self.start - window) + window * (window + 1) // 2


def plan_chunks(
    running: Iterable[Running], prefill_tokens: int, next_stop: Callable[[Running], int | None]
) -> list[Chunk]:
    """One token of every request that decodes, and prompts in order of admission as far as the budget reaches.

    A chunk ends exactly where the next checkpoint is due, if not before: a state is stored at its own position.

    Args:
        running: in order of admission.
        prefill_tokens: prompt tokens of all requests together. Replay windows ride along uncounted.
        next_stop: where a request must next be checkpointed.
    """
    chunks = []
    for r in running:
        start = r.lease.state_position
        stop = next_stop(r)
        prefill = start < r.lease.prompt.prompt_tokens
        tokens = min(r.lease.num_tokens - start, prefill_tokens) if prefill else 1
        if not tokens:
            continue
        end = start + tokens if stop is None else min(start + tokens, stop)
        if prefill:
            prefill_tokens -= end - start
        chunks.append(Chunk(r, start, end, stops=end == stop, prefill=prefill))
    return chunks
