"""The protocol: the same requests in every arm, statistics of all of them by seed, and how far outputs agree."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import dasc.fast
import dasc.reference
from dasc.eval.conversations import Turn
from dasc.eval.replay import (
    ArmReport,
    Protocol,
    SeedResult,
    _compared,
    _result,
    _Run,
    _run,
    default_kv_tokens,
    replay,
)
from dasc.eval.replay_arms import PreparedArm, build_engine, prepare_arm
from tests.eval.replay_runs import tiny_chats, tiny_served, tiny_serving

TIMES = ("ttft_mean_s", "ttft_p95_s", "e2e_mean_s", "e2e_p95_s", "seconds", "stall_s")
ZERO = SeedResult(**{f.name: 0 for f in dataclasses.fields(SeedResult)})


def run_tiny(
    arms: tuple[str, ...], *, w_max: tuple[int, ...] = (16,), seeds: int = 1, **options
) -> dict[str, ArmReport]:
    served = tiny_served()
    protocol = Protocol(arms, w_max, concurrency=8, seeds=seeds, temperature=options.pop("temperature", 0.0))
    progress = options.pop("progress", lambda label: None)
    reports = replay(tiny_chats(), protocol, served, tiny_serving(served, **options), progress)
    return {report.label: report for report in reports}


def test_a_replay_serves_every_request_in_every_arm_and_round():
    """Rounds begin with another arm each, and the compressed arms hold and hit more in the same memory."""
    seen = []
    reports = run_tiny(("dense", "nr", "wr", "off"), seeds=2, progress=seen.append)
    requests = sum(map(len, tiny_chats()))
    runs = [seen[i * requests : (i + 1) * requests] for i in range(8)]
    assert [set(run) for run in runs] == [{x} for x in ("dense", "nr", "wr", "off", "nr", "wr", "off", "dense")]
    assert all(len(report.seeds) == 2 for report in reports.values())
    dense, nr, wr, off = (reports[label].mean for label in ("dense", "nr", "wr", "off"))
    assert nr["token_hit_rate"] > dense["token_hit_rate"] > off["token_hit_rate"] == off["request_hit_rate"] == 0
    assert nr["checkpoints_held"] > dense["checkpoints_held"] > off["checkpoints_held"] == 0
    assert dense["same_output"] == off["same_output"] == 1.0
    assert dense["first_difference"] is None
    assert 0 < nr["same_output"] < 1
    assert wr["same_output"] > nr["same_output"]
    assert wr["refresh_tokens"] > nr["refresh_tokens"] == 0
    assert dense["compressed_hits"] == 0 < nr["compressed_hits"]
    prompts = sum(len(turn.prompt) for chat in tiny_chats() for turn in chat)
    for mean in (dense, nr, wr, off):
        assert mean["prefill_tokens"] == pytest.approx(prompts * (1 - mean["token_hit_rate"]))
        assert 0 < mean["ttft_mean_s"] <= mean["ttft_p95_s"] <= mean["e2e_p95_s"]
        assert mean["ttft_mean_s"] < mean["e2e_mean_s"] < mean["seconds"]
    assert all(report.steps and report.as_dict()["seeds"] for report in reports.values())


def test_all_but_times_is_the_same_whenever_it_is_run():
    def all_but_times() -> list[dict]:
        reports = run_tiny(("nr", "random"), temperature=1.0)
        return [
            {k: v for k, v in dataclasses.asdict(seed).items() if k not in TIMES}
            for report in reports.values()
            for seed in report.seeds
        ]

    assert all_but_times() == all_but_times()


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_fast_operators_answer_as_the_reference_does(kind: str):
    """Recurrences, convolution, packing; both layouts and codes."""
    for arm in ("wr", "padded", "int8", "int4"):
        outputs = []
        for ops in (dasc.reference, dasc.fast):
            served = tiny_served(kind, ops)
            serving = tiny_serving(served)
            run = _run(
                prepare_arm(arm, 16, served, serving),
                tiny_chats(4, 2),
                Protocol((arm,), (16,), concurrency=8, seeds=1),
                served,
                serving,
                0,
            )
            assert run.result.compressed_hits
            outputs.append(run.outputs)
        assert outputs[0] == outputs[1]


def test_seeds_change_the_order_and_what_is_drawn():
    first, second = run_tiny(("dense",), seeds=2)["dense"].seeds
    assert first.token_hit_rate != second.token_hit_rate


def test_each_seed_has_its_random_mask(monkeypatch: pytest.MonkeyPatch):
    masks = []

    def watched(prepared: PreparedArm, *others: object) -> object:
        masks.append(prepared.layout.mask)
        return build_engine(prepared, *others)

    monkeypatch.setattr("dasc.eval.replay.build_engine", watched)
    run_tiny(("random",), seeds=2)
    assert len(masks) == 3  # the first one is for warming up
    assert not torch.equal(masks[1], masks[2])


def test_several_cutoffs_run_the_arms_that_have_one():
    protocol = Protocol(("dense", "nr", "wr"), (16, 32), 1, 1)
    assert [label for label, _, _ in protocol.runs] == ["dense", "nr 16", "nr 32", "wr 16", "wr 32"]
    assert [w for _, _, w in protocol.runs][1:] == [16, 32, 16, 32]
    reports = run_tiny(("nr", "off"), w_max=(16, 32))
    assert [(r.label, r.w_max) for r in reports.values()] == [("nr 16", 16), ("nr 32", 32), ("off", None)]
    assert reports["nr 32"].prepared.compression > reports["nr 16"].prepared.compression
    assert reports["nr 16"].mean["same_output"] is None  # nothing to compare with


def record(ttft: float, e2e: float, prompt: int = 10, hit: int = 0, tier: str = "miss") -> SimpleNamespace:
    return SimpleNamespace(
        record=SimpleNamespace(ttft_s=ttft, e2e_s=e2e, prompt_tokens=prompt, hit_tokens=hit, tier=tier)
    )


def test_statistics_are_of_all_requests_misses_included():
    engine = SimpleNamespace(
        cache=SimpleNamespace(
            counters=SimpleNamespace(
                evictions={"kv": 2, "room": 3}, demotions=1, spills=4, forced_waits=6, stall_s=0.5
            ),
            ledger=SimpleNamespace(store=SimpleNamespace(dense_count=2, compressed_count=5)),
        ),
        steps=[
            SimpleNamespace(prefill_tokens=7, refresh_tokens=2),
            SimpleNamespace(prefill_tokens=1, refresh_tokens=0),
        ],
    )
    answers = [record(1, 2), record(2, 3, 30, 20, "compressed"), record(3, 10, 10, 5, "dense"), record(10, 21)]
    result = _result(engine, answers, 30.0)
    assert (result.ttft_mean_s, result.e2e_mean_s) == (4, 9)
    assert result.ttft_p95_s == pytest.approx(np.percentile([1, 2, 3, 10], 95))
    assert result.e2e_p95_s == pytest.approx(np.percentile([2, 3, 10, 21], 95))
    assert (result.token_hit_rate, result.request_hit_rate) == (25 / 60, 0.5)
    assert (result.dense_hits, result.compressed_hits, result.checkpoints_held) == (1, 1, 7)
    assert (result.evictions, result.demotions, result.spills) == (5, 1, 4)
    assert (result.forced_waits, result.stall_s) == (6, 0.5)
    assert (result.prefill_tokens, result.refresh_tokens, result.seconds) == (8, 2, 30)


def test_means_are_over_seeds_and_ratios_within_a_round():
    def report(times: tuple[float, ...], differ: tuple[float | None, ...]) -> ArmReport:
        seeds = [dataclasses.replace(ZERO, ttft_p95_s=t, first_difference=d) for t, d in zip(times, differ)]
        return ArmReport("x", None, None, tuple(seeds), (), ())

    a, b = report((1, 9), (None, 4.0)), report((2, 6), (None, None))
    assert a.mean["ttft_p95_s"] == 5
    assert a.mean["first_difference"] == 4
    assert b.mean["first_difference"] is None
    assert a.ratio(b, "ttft_p95_s") == (1 / 2 + 9 / 6) / 2  # not 5 / 4


def test_agreement_counts_equal_answers_and_finds_the_first_difference():
    def run(**outputs: tuple[int, ...]) -> _Run:
        return _Run(None, ZERO, outputs, [], [])

    baseline = run(a=(1, 2, 3), b=(1, 2, 3), c=(4,), d=(5, 6))
    result = _compared(run(d=(5, 6), a=(1, 2, 3), b=(1, 2, 9), c=(0,)), baseline)
    assert (result.same_output, result.first_difference) == (0.5, 1.0)
    same = _compared(baseline, baseline)
    assert (same.same_output, same.first_difference) == (1.0, None)


def test_kv_holds_all_conversations_by_default_but_not_without_end():
    assert default_kv_tokens([[Turn((1,) * 3, 2), Turn((1,) * 9, 4)], [Turn((1,), 1)]]) == 9 + 6 + 2
    assert default_kv_tokens([[Turn((1,) * 1000, 1)]] * 1000) == 1 << 18
    assert default_kv_tokens([[Turn((1,) * 300_000, 5)]] * 2) == 300_005


def test_what_cannot_be_run_is_refused_before_anything_runs():
    served = tiny_served()
    seen = []
    with pytest.raises(ValueError, match="arm nr: a budget of"):
        replay(
            tiny_chats(),
            Protocol(("dense", "nr"), (16,), 1, 1),
            served,
            tiny_serving(served, dense_slots=4),
            seen.append,
        )
    with pytest.raises(ValueError, match="conversations must hold at least one"):
        replay([], Protocol(("dense",), (16,), 1, 1), served, tiny_serving(served))
    assert seen == []
    for fields, message in (
        ({"arms": ("dense", "warm")}, "arms must be of dense, nr, wr.*, got 'warm'"),
        ({"arms": ()}, "arms must hold at least one entry and none twice"),
        ({"w_max": (16, 16)}, "w_max must hold"),
        ({"concurrency": 0}, "concurrency and seeds must be >= 1"),
        ({"seeds": 0}, "concurrency and seeds"),
    ):
        with pytest.raises(ValueError, match=message):
            Protocol(**{"arms": ("dense",), "w_max": (16,), "concurrency": 1, "seeds": 1} | fields)
