"""What the engine is asked and what it answers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dasc.cache.lease import Lease
from dasc.cache.radix import TOKEN_BYTES
from dasc.cache.records import RequestRecord


@dataclass(frozen=True)
class Request:
    """One prompt and how to go on from it.

    Attributes:
        request_id: any name not in use.
        tokens: the prompt's token ids, at least one.
        max_new_tokens: tokens to generate, at least one; exactly so many are.
        temperature: 0 takes the likeliest token; above, tokens are drawn from the softmax of ``logits / temperature``.
        seed: of the request's own generator: what it draws depends on no other request.
        lookup: use what is cached.
        store: leave checkpoints behind.

    Raises:
        ValueError: naming the field.
    """

    request_id: str
    tokens: tuple[int, ...] = field(repr=False)
    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    lookup: bool = True
    store: bool = True

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError(f"tokens of request {self.request_id!r} must hold at least one token, got none")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be >= 1, got {self.max_new_tokens}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be finite and not negative, got {self.temperature}")

    @property
    def fed_tokens(self) -> int:
        """Tokens that go through the model at most: the last one generated does not."""
        return len(self.tokens) + self.max_new_tokens - 1


@dataclass(frozen=True)
class Answer:
    """A completed request.

    Attributes:
        request: what was asked.
        tokens: the generated token ids.
        record: times, and what the cache had.
    """

    request: Request
    tokens: tuple[int, ...]
    record: RequestRecord


@dataclass(frozen=True)
class Waiting:
    """A request in the queue.

    Attributes:
        request: what was asked.
        arrival_s: when, on the engine's clock.
        lookup: use what is cached; no longer after a state that could not be read.
    """

    request: Request
    arrival_s: float
    lookup: bool


@dataclass(eq=False)
class Running:
    """An admitted request.

    Attributes:
        waiting: what it was in the queue.
        lease: its share of the cache; its tokens are the prompt and what was generated and goes on.
        tier: of the state it was served from, or ``"miss"``.
        window_tokens: replay tokens its next forward starts with; 0 once refreshed.
        outputs: generated token ids.
        first_token_s: when the first of them came, on the engine's clock.
    """

    waiting: Waiting
    lease: Lease
    tier: str
    window_tokens: int
    outputs: list[int] = field(default_factory=list)
    first_token_s: float = 0.0

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.request.seed)

    @property
    def request(self) -> Request:
        return self.waiting.request

    def span(self, start: int, end: int) -> Tensor:
        """Token ids at positions ``start .. end - 1``, int64."""
        ids = np.frombuffer(bytes(self.lease.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES]), np.int32)
        return torch.from_numpy(ids.astype(np.int64))

    def kv_slots(self, end: int, page_size: int) -> Tensor:
        """KV slots of positions ``0 .. end - 1``, int64; valid until the request is next checkpointed."""
        pages = self.lease.page_table[: -(-end // page_size)].astype(np.int64)
        return torch.from_numpy((pages[:, None] * page_size + np.arange(page_size)).reshape(-1)[:end])

    def choose(self, logits: Tensor) -> int:
        """The next token from ``logits`` ``[vocab]``.

        Raises:
            ValueError: when the model has answered with no numbers.
        """
        if not logits.isfinite().all():
            raise ValueError(f"request {self.request.request_id!r}: the model's logits hold NaN or infinity")
        if self.request.temperature == 0:
            return int(logits.argmax())
        chances = torch.softmax(logits.double() / self.request.temperature, dim=0)
        return int(torch.multinomial(chances, 1, generator=self._generator))

    def answer(self, now_s: float) -> Answer:
        """The completed request."""
        arrival_s = self.waiting.arrival_s
        record = RequestRecord(
            request_id=self.request.request_id,
            arrival_s=arrival_s,
            ttft_s=self.first_token_s - arrival_s,
            e2e_s=now_s - arrival_s,
            prompt_tokens=len(self.request.tokens),
            hit_tokens=self.lease.hit_tokens,
            tier=self.tier,
            output_tokens=len(self.outputs),
        )
        return Answer(self.request, tuple(self.outputs), record)
