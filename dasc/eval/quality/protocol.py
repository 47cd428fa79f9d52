"""Warm-up and replay (appendix C.2): fill the cache with one unscored request a prefix, then measure all asks R times.

A block is the items of one task that share a filled cache: flush, warm, look at what is resident, replay. All measured
outputs are scored, hit or not; outputs and tokens of the warm requests are thrown away.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import numpy as np

from dasc.eval.items import Item, Scorer, Text
from dasc.eval.quality.backend import Backend, Query, Reply, Residency

WARM_TOKENS = 1
"""An unscored request ends as soon as its prompt is stored."""


@dataclass(frozen=True)
class Controls:
    """What a block and an arm must fulfil in the controlled protocol; what a backend cannot tell counts as unfulfilled.

    Attributes:
        min_available_slots: after warming.
        min_hit: token hit of a block must be above it.
        min_loaded_block: share of a block's measured requests that are served from the cache at all.
        min_loaded_arm: the same over an arm.
    """

    min_available_slots: int
    min_hit: float = 0.70
    min_loaded_block: float = 0.95
    min_loaded_arm: float = 0.99


@dataclass(frozen=True)
class Protocol:
    """How every arm is measured.

    Attributes:
        block_items: most items of a block.
        slots: checkpoint slots of every arm; ``None`` where the backend has its own.
        concurrency: clients.
        replays: measured rounds over all asks, ``R``; each item's own when ``None``.
        seed: of the order of replays and of what is drawn.
        temperature: of measured answers; 0 is greedy.
        controls: of the controlled protocol, ``None`` without.

    Raises:
        ValueError: naming the field.
    """

    block_items: int
    slots: int | None
    concurrency: int
    replays: int | None = None
    seed: int = 0
    temperature: float = 0.0
    controls: Controls | None = None

    def __post_init__(self) -> None:
        for name in ("block_items", "slots", "concurrency", "replays"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be finite and not negative, got {self.temperature}")

    def replays_of(self, item: Item) -> int:
        """Measured rounds over an item's asks."""
        return self.replays or item.replays

    def requests(self, items: Sequence[Item]) -> int:
        """All requests of a block of ``items``, warm ones included."""
        return len({item.warm for item in items}) + sum(self.replays_of(item) * len(item.asks) for item in items)


def paper_controls(concurrency: int) -> Controls:
    """The paper's: a free slot for every client and 16 more, 272 for its 256 clients."""
    return Controls(min_available_slots=concurrency + 16)


@dataclass(frozen=True)
class Block:
    """Items of one task that are warm at the same time.

    Attributes:
        task: of all of them.
        number: within the task, from 0.
        items: at least one.
    """

    task: str
    number: int
    items: tuple[Item, ...]

    @property
    def key(self) -> str:
        return f"{self.task}/{self.number}"


def make_blocks(items: Sequence[Item], block_items: int) -> list[Block]:
    """Items in the order given, each task's in blocks of ``block_items``.

    Raises:
        ValueError: for no items, a task that is not in one piece, or an id that a task has twice.
    """
    if not items:
        raise ValueError("items must hold at least one, got none")
    tasks = [(task, tuple(group)) for task, group in groupby(items, lambda item: item.task)]
    names = [task for task, _ in tasks]
    if len(set(names)) != len(names):
        raise ValueError(f"items of a task must follow each other, got the tasks {names}")
    blocks = []
    for task, group in tasks:
        ids = [item.item_id for item in group]
        if len(set(ids)) != len(ids):
            raise ValueError(f"items of task {task!r} must have different ids")
        chunks = [group[first : first + block_items] for first in range(0, len(group), block_items)]
        blocks += [Block(task, number, chunk) for number, chunk in enumerate(chunks)]
    return blocks


@dataclass(frozen=True)
class Measurement:
    """One measured request.

    Attributes:
        item_id: its item.
        ask: index into the item's asks.
        replay: round, from 0.
        score: of the answer, in [0, 1].
        cached_tokens: ``C_i``.
        new_tokens: ``N_i``.
        finish: why the answer ended.
        ttft_s: time to the first token.
        answer: what was scored.
    """

    item_id: str
    ask: int
    replay: int
    score: float
    cached_tokens: int
    new_tokens: int
    finish: str
    ttft_s: float | None
    answer: Text


@dataclass(frozen=True)
class BlockResult:
    """A finished block of an arm.

    Attributes:
        arm: label.
        task: of the items.
        number: of the block within the task.
        measured: all rounds, in the order of items, asks and rounds.
        available_slots: after warming; ``None`` if the backend cannot tell.
        evictions: while replaying; ``None`` if the backend cannot tell.
        failures: controls that it did not fulfil, in words.
    """

    arm: str
    task: str
    number: int
    measured: tuple[Measurement, ...]
    available_slots: int | None
    evictions: int | None
    failures: tuple[str, ...]

    @property
    def hit(self) -> float:
        return token_hit(self.measured)

    @property
    def loaded(self) -> float:
        return loaded_share(self.measured)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; :meth:`from_dict` takes them back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> BlockResult:
        """What :meth:`as_dict` gave, perhaps by way of JSON."""
        measured = tuple(
            Measurement(**{**m, "answer": m["answer"] if isinstance(m["answer"], str) else tuple(m["answer"])})
            for m in values["measured"]
        )
        return cls(**{**values, "measured": measured, "failures": tuple(values["failures"])})


def token_hit(measured: Sequence[Measurement]) -> float:
    """``sum C / sum (C + N)`` over measured requests."""
    cached = sum(m.cached_tokens for m in measured)
    return cached / (cached + sum(m.new_tokens for m in measured))


def loaded_share(measured: Sequence[Measurement]) -> float:
    """Share of measured requests that were served from the cache at all."""
    return sum(m.cached_tokens > 0 for m in measured) / len(measured)


def run_block(
    arm: str,
    block: Block,
    backend: Backend,
    protocol: Protocol,
    score: Scorer,
    on_reply: Callable[[], None] = lambda: None,
) -> BlockResult:
    """Measure one block: the same requests in the same order with the same seeds whatever the arm.

    Args:
        arm: label, for the result only.
        block: items.
        backend: serves the arm.
        protocol: how.
        score: of an answer.
        on_reply: called for each request answered.

    Raises:
        BackendError: when the backend fails.
        ValueError: for a score outside [0, 1].
    """
    backend.flush()
    backend.ask(_warm_queries(block), protocol.concurrency, on_reply)
    warm = backend.residency()
    measured: dict[tuple[int, int, int], Measurement] = {}
    rounds = _rounds(block, protocol)
    for replay, order in enumerate(rounds):
        queries = [_query(block, i, a, replay, protocol) for i, a in order]
        replies = backend.ask(queries, protocol.concurrency, on_reply)
        for (i, a), reply in zip(order, replies, strict=True):
            measured[i, a, replay] = _measure(block.items[i], a, replay, reply, score)
    after = backend.residency()
    ordered = tuple(measured[key] for key in sorted(measured))
    evictions = None if None in (warm.evictions, after.evictions) else after.evictions - warm.evictions  # type: ignore[operator]
    failures = () if protocol.controls is None else _failures(protocol.controls, ordered, warm, evictions)
    return BlockResult(arm, block.task, block.number, ordered, warm.available_slots, evictions, failures)


def _warm_queries(block: Block) -> list[Query]:
    """One for each prefix: questions about one conversation share it."""
    repeated: dict[Text, bool] = {}
    for item in block.items:
        repeated[item.warm] = repeated.get(item.warm, False) or any(ask.prompt == item.warm for ask in item.asks)
    return [
        Query(f"{block.key}/warm/{i}", warm, WARM_TOKENS, warm=True, repeated=again)
        for i, (warm, again) in enumerate(repeated.items())
    ]


def _rounds(block: Block, protocol: Protocol) -> list[list[tuple[int, int]]]:
    """For each round the ``(item, ask)`` measured in it, shuffled by seed, block and round alone."""
    rng = np.random.default_rng((protocol.seed, block.number))
    rounds = []
    for replay in range(max(protocol.replays_of(item) for item in block.items)):
        items = [(i, item) for i, item in enumerate(block.items) if replay < protocol.replays_of(item)]
        asks = [(i, a) for i, item in items for a in range(len(item.asks))]
        rounds.append([asks[i] for i in rng.permutation(len(asks))])
    return rounds


def _query(block: Block, i: int, a: int, replay: int, protocol: Protocol) -> Query:
    item = block.items[i]
    numbers = (protocol.seed, block.number, i, a, replay)
    return Query(
        name=f"{block.key}/{i}/{a}/{replay}",
        prompt=item.asks[a].prompt,
        max_new_tokens=item.max_new_tokens,
        temperature=protocol.temperature,
        seed=int(np.random.SeedSequence(numbers).generate_state(1)[0]),
    )


def _measure(item: Item, ask: int, replay: int, reply: Reply, score: Scorer) -> Measurement:
    value = float(score(item, item.asks[ask], reply.answer))
    if not 0 <= value <= 1:
        raise ValueError(f"the score of an answer must be in [0, 1], scorer {item.scorer!r} gave {value}")
    return Measurement(
        item_id=item.item_id,
        ask=ask,
        replay=replay,
        score=value,
        cached_tokens=reply.cached_tokens,
        new_tokens=reply.prompt_tokens - reply.cached_tokens,
        finish=reply.finish,
        ttft_s=reply.ttft_s,
        answer=reply.answer,
    )


def _failures(
    controls: Controls, measured: Sequence[Measurement], warm: Residency, evictions: int | None
) -> tuple[str, ...]:
    hit, loaded, available = token_hit(measured), loaded_share(measured), warm.available_slots
    found = []
    if available is None:
        found.append("the backend does not tell how many slots are available")
    elif available < controls.min_available_slots:
        found.append(f"{available} slots available after warming, fewer than {controls.min_available_slots}")
    if evictions is None:
        found.append("the backend does not tell evictions")
    elif evictions:
        found.append(f"{evictions} evictions while replaying")
    if hit <= controls.min_hit:
        found.append(f"token hit {hit:.3f}, not above {controls.min_hit}")
    if loaded < controls.min_loaded_block:
        found.append(f"{loaded:.1%} of requests loaded, below {controls.min_loaded_block:.0%}")
    return tuple(found)


def arm_failures(controls: Controls | None, blocks: Sequence[BlockResult]) -> tuple[str, ...]:
    """What an arm did not fulfil, its blocks' failures included; nothing without controls."""
    if controls is None:
        return ()
    found = [f"{block.task}/{block.number}: {failure}" for block in blocks for failure in block.failures]
    loaded = loaded_share([m for block in blocks for m in block.measured])
    if loaded < controls.min_loaded_arm:
        found.append(f"{loaded:.1%} of all requests loaded, below {controls.min_loaded_arm:.0%}")
    return tuple(found)
