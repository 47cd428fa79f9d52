"""The serving protocol of appendix C.3 in small: the same conversations, order and seeds through several arms."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from dasc.cache.engine import Answer, Engine, Request
from dasc.cache.records import StepRecord, TransferRecord
from dasc.eval.conversations import Turn
from dasc.eval.replay_arms import ARMS, PreparedArm, Serving, build_engine, prepare_arm
from dasc.eval.served_model import ServedModel

BASELINE = "dense"
_MOST_KV_TOKENS = 1 << 18


@dataclass(frozen=True)
class Protocol:
    """How a replay is run.

    Attributes:
        arms: names of :data:`~dasc.eval.replay_arms.ARMS`.
        w_max: cutoffs in tokens; with several, arms that depend on it are run once for each.
        concurrency: clients.
        seeds: runs of each arm; the seed sets the order of conversations, the random mask and what is drawn.
        temperature: of sampling; 0 takes the likeliest tokens.
    """

    arms: tuple[str, ...]
    w_max: tuple[int, ...]
    concurrency: int
    seeds: int
    temperature: float = 0.0

    def __post_init__(self) -> None:
        for name in ("arms", "w_max"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise ValueError(f"{name} must hold at least one entry and none twice, got {values}")
        unknown = [arm for arm in self.arms if arm not in ARMS]
        if unknown:
            raise ValueError(f"arms must be of {', '.join(ARMS)}, got {unknown[0]!r}")
        if self.concurrency < 1 or self.seeds < 1:
            raise ValueError(f"concurrency and seeds must be >= 1, got {self.concurrency} and {self.seeds}")

    @property
    def runs(self) -> list[tuple[str, str, int]]:
        """Label, arm and cutoff of what is run for each seed."""
        return [
            (f"{arm} {w}" if ARMS[arm].compressed and len(self.w_max) > 1 else arm, arm, w)
            for arm in self.arms
            for w in (self.w_max if ARMS[arm].compressed else self.w_max[:1])
        ]


@dataclass(frozen=True)
class SeedResult:
    """One arm and one seed. Times and rates are of all requests, misses included (appendix C.3).

    Attributes:
        ttft_mean_s: from the client's sending to the first token, queueing included.
        ttft_p95_s: 95th percentile.
        e2e_mean_s: to the last token.
        e2e_p95_s: 95th percentile.
        token_hit_rate: prompt tokens served from the cache, of all.
        request_hit_rate: requests that hit at all.
        dense_hits: requests served from a dense checkpoint.
        compressed_hits: from a compressed one.
        checkpoints_held: in both tiers, when the run was over.
        evictions: checkpoints dropped.
        demotions: dense checkpoints compressed under pressure.
        spills: finished requests that kept their dense slot since the compressed pool was full.
        prefill_tokens: prompt tokens computed.
        refresh_tokens: replayed besides.
        forced_waits: admissions that had to wait for a pack to end.
        stall_s: waiting for packs.
        seconds: from the first request to the last answer.
        same_output: share of requests answered with the same tokens as in the dense arm of this seed; ``None`` without
            that arm.
        first_difference: mean position of the first token that differs, over the requests that do; ``None`` if none.
        right: share of requests answered right, of those with a right answer; ``None`` if none has one.
    """

    ttft_mean_s: float
    ttft_p95_s: float
    e2e_mean_s: float
    e2e_p95_s: float
    token_hit_rate: float
    request_hit_rate: float
    dense_hits: int
    compressed_hits: int
    checkpoints_held: int
    evictions: int
    demotions: int
    spills: int
    prefill_tokens: int
    refresh_tokens: int
    forced_waits: int
    stall_s: float
    seconds: float
    same_output: float | None = None
    first_difference: float | None = None
    right: float | None = None


@dataclass(frozen=True, eq=False)
class ArmReport:
    """One arm over all seeds.

    Attributes:
        label: for reports.
        w_max: cutoff; ``None`` for an arm without a compressed pool.
        prepared: its memory, at the first seed.
        seeds: one result each.
        steps: a record of each forward of all seeds.
        transfers: of each transfer.
    """

    label: str
    w_max: int | None
    prepared: PreparedArm
    seeds: tuple[SeedResult, ...]
    steps: tuple[StepRecord, ...]
    transfers: tuple[TransferRecord, ...]

    @property
    def mean(self) -> dict[str, float | None]:
        """Each figure of :class:`SeedResult`, mean over the seeds that have it."""
        means = {}
        for field in dataclasses.fields(SeedResult):
            values = [v for v in (getattr(seed, field.name) for seed in self.seeds) if v is not None]
            means[field.name] = fmean(values) if values else None
        return means

    def ratio(self, other: ArmReport, name: str) -> float:
        """Mean over the seeds of a figure over that of another arm, whose run came in the same round."""
        return fmean(getattr(a, name) / getattr(b, name) for a, b in zip(self.seeds, other.seeds))

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, without the records."""
        layout = self.prepared.layout
        return {
            "label": self.label,
            "arm": self.prepared.name,
            "w_max": self.w_max,
            "memory": dataclasses.asdict(self.prepared.split),
            "compression": self.prepared.compression,
            "checkpoint_bytes": None if layout is None else layout.slot_bytes,
            "replay_tokens": self.prepared.replay_tokens,
            "refresh_below_tokens": self.prepared.refresh_below_tokens,
            "mean": self.mean,
            "seeds": [dataclasses.asdict(seed) for seed in self.seeds],
        }


def default_kv_tokens(conversations: Sequence[Sequence[Turn]]) -> int:
    """Tokens of all conversations and their answers, but at most 262,144, or the largest request's if that is more."""
    needed = sum(len(turns[-1].prompt) + sum(turn.answer_tokens for turn in turns) for turns in conversations)
    largest = max((len(turn.prompt) + turn.answer_tokens for turns in conversations for turn in turns), default=1)
    return min(needed, max(_MOST_KV_TOKENS, largest))


def replay(
    conversations: Sequence[Sequence[Turn]],
    protocol: Protocol,
    served: ServedModel,
    serving: Serving,
    progress: Callable[[str], None] = lambda label: None,
) -> list[ArmReport]:
    """Run every arm once for each seed, arms in turn, so that a slow spell of the machine meets all of them.

    Args:
        conversations: turns of each.
        protocol: arms and seeds.
        served: the model.
        serving: memory and limits of all arms.
        progress: called for each request answered, with the label of the arm.

    Raises:
        ValueError: before anything is run, for no conversations, an unknown arm or memory too small for one; as
            :class:`~dasc.cache.engine.Engine` for requests that do not fit.
    """
    if not conversations:
        raise ValueError("conversations must hold at least one, got none")
    for _, arm, w_max in protocol.runs:
        prepare_arm(arm, w_max, served, serving)
    _, arm, w_max = protocol.runs[0]
    _run(prepare_arm(arm, w_max, served, serving), [c[:1] for c in conversations[:2]], protocol, served, serving, 0)

    runs: dict[str, list[_Run]] = {label: [] for label, _, _ in protocol.runs}
    for seed in range(protocol.seeds):
        first = seed % len(protocol.runs)  # each round begins with another arm
        for label, arm, w_max in protocol.runs[first:] + protocol.runs[:first]:
            prepared = prepare_arm(arm, w_max, served, serving, seed=seed)
            report = partial(progress, label)
            runs[label].append(_run(prepared, conversations, protocol, served, serving, seed, report))
    baseline = runs.get(BASELINE)
    return [
        ArmReport(
            label=label,
            w_max=w_max if ARMS[arm].compressed else None,
            prepared=runs[label][0].prepared,
            seeds=tuple(
                run.result if baseline is None else _compared(run, baseline[seed])
                for seed, run in enumerate(runs[label])
            ),
            steps=tuple(step for run in runs[label] for step in run.steps),
            transfers=tuple(transfer for run in runs[label] for transfer in run.transfers),
        )
        for label, arm, w_max in protocol.runs
    ]


@dataclass(frozen=True, eq=False)
class _Run:
    """One arm and one seed, with its outputs by request."""

    prepared: PreparedArm
    result: SeedResult
    outputs: dict[str, tuple[int, ...]]
    steps: list[StepRecord]
    transfers: list[TransferRecord]


def _run(
    prepared: PreparedArm,
    conversations: Sequence[Sequence[Turn]],
    protocol: Protocol,
    served: ServedModel,
    serving: Serving,
    seed: int,
    report: Callable[[], None] = lambda: None,
) -> _Run:
    requests = [
        [
            Request(
                request_id=f"{number}.{turn_number}",
                tokens=turn.prompt,
                max_new_tokens=turn.answer_tokens,
                temperature=protocol.temperature,
                seed=int(np.random.SeedSequence((seed, number, turn_number)).generate_state(1)[0]),
                lookup=prepared.arm.cached,
                store=prepared.arm.cached,
            )
            for turn_number, turn in enumerate(conversation)
        ]
        for number, conversation in enumerate(conversations)
    ]
    order = np.random.default_rng(seed).permutation(len(requests))
    engine = build_engine(prepared, served, serving)
    started = time.perf_counter()
    with closing(engine):
        answers = engine.run(
            [requests[i] for i in order], concurrency=protocol.concurrency, on_answer=lambda _: report()
        )
        seconds = time.perf_counter() - started
        engine.cache.ledger.store.settle()
    outputs = {answer.request.request_id: answer.tokens for answer in answers}
    known = {
        request.request_id: turn.right
        for of_conversation, conversation in zip(requests, conversations, strict=True)
        for request, turn in zip(of_conversation, conversation, strict=True)
        if turn.right is not None
    }
    result = dataclasses.replace(
        _result(engine, answers, seconds),
        right=fmean(outputs[name] == right for name, right in known.items()) if known else None,
    )
    return _Run(prepared, result, outputs, engine.steps, engine.transfers)


def _result(engine: Engine, answers: Sequence[Answer], seconds: float) -> SeedResult:
    records = [answer.record for answer in answers]
    ttft = np.array([record.ttft_s for record in records])
    e2e = np.array([record.e2e_s for record in records])
    counters, store = engine.cache.counters, engine.cache.ledger.store
    return SeedResult(
        ttft_mean_s=float(ttft.mean()),
        ttft_p95_s=float(np.percentile(ttft, 95)),
        e2e_mean_s=float(e2e.mean()),
        e2e_p95_s=float(np.percentile(e2e, 95)),
        token_hit_rate=sum(r.hit_tokens for r in records) / sum(r.prompt_tokens for r in records),
        request_hit_rate=sum(r.tier != "miss" for r in records) / len(records),
        dense_hits=sum(r.tier == "dense" for r in records),
        compressed_hits=sum(r.tier == "compressed" for r in records),
        checkpoints_held=store.dense_count + store.compressed_count,
        evictions=sum(counters.evictions.values()),
        demotions=counters.demotions,
        spills=counters.spills,
        prefill_tokens=sum(step.prefill_tokens for step in engine.steps),
        refresh_tokens=sum(step.refresh_tokens for step in engine.steps),
        forced_waits=counters.forced_waits,
        stall_s=counters.stall_s,
        seconds=seconds,
    )


def _compared(run: _Run, baseline: _Run) -> SeedResult:
    """The run's result with what its outputs have in common with those of another run of the same requests."""
    pairs = [(tokens, baseline.outputs[name]) for name, tokens in run.outputs.items()]
    positions = [next(i for i, (a, b) in enumerate(zip(*pair)) if a != b) for pair in pairs if pair[0] != pair[1]]
    return dataclasses.replace(
        run.result,
        same_output=1 - len(positions) / len(pairs),
        first_difference=fmean(positions) if positions else None,
    )
