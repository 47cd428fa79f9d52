"""Two tiers in the real engine. As elsewhere a leak or a broken tree, found when idle, ends the run."""

import functools
import re

import pytest
import torch

from dasc.models import read_checkpoint
from dasc.planner import build_plan
from tests.sglang import loads, runs
from tests.sglang.engines import Conversations, Flush, Observe, Run, run
from tests.sglang.measures import assert_same_distributions, tokens
from tests.sglang.tiny_models import FAMILIES

TALK, TALK_AT_ONCE, READ, LOAD = range(4)
LONG_WINDOW = 2048
each_family = pytest.mark.parametrize("family", FAMILIES)


@functools.cache
def keep_all(family: str) -> Run:
    """A plan that omits nothing, in the bytes that the dense server has, ten slots of them compressed ones."""
    env = {"DASC_PLAN": str(runs.keep_all_plan(family)), "DASC_MODE": "two-tier", "DASC_POOL": "10"}
    env |= {"DASC_WATERMARK": "1", "DASC_LOG_INTERVAL": "1"}
    return run(runs.model(family), loads.phases(), env=env, max_mamba_cache_size=loads.SLOTS, log_level="info")


@functools.cache
def real(ranks: int) -> Run:
    """A real plan, so few compressed slots that states spill, and prompts in chunks."""
    env = {"DASC_PLAN": "auto", "DASC_W_MAX": str(runs.W_MAX), "DASC_MODE": "two-tier", "DASC_POOL": "3"}
    if ranks > 1:
        env |= {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    steps = [
        Conversations(loads.conversations()),
        Flush(),
        Conversations(loads.load(), concurrency=8),
        Observe(),
        Flush(),
        Observe(),
    ]
    return run(
        runs.model("kimi-linear"),
        steps,
        env=env,
        max_mamba_cache_size=10,
        tp_size=ranks,
        chunked_prefill_size=32,
    )


@functools.cache
def refreshed() -> Run:
    """Compressed hits replay windows as long as any prefix here, so that what they omit comes back whole."""
    env = {"DASC_PLAN": "auto", "DASC_W_MAX": str(LONG_WINDOW), "DASC_LOAD_POLICY": "wr", "DASC_MODE": "two-tier"}
    env |= {"DASC_POOL": "3", "DASC_LOG_INTERVAL": "1"}
    steps = [Conversations(loads.conversations()), Flush(), Conversations(loads.conversations(), concurrency=3)]
    return run(runs.model("kimi-linear"), steps, env=env, max_mamba_cache_size=loads.SLOTS, log_level="info")


@each_family
@pytest.mark.parametrize("phase", [TALK, TALK_AT_ONCE, READ])
def test_a_plan_that_keeps_everything_answers_as_dense(family: str, phase: int) -> None:
    assert tokens(keep_all(family).answers[phase]) == tokens(runs.dense(family).answers[phase])


@each_family
def test_a_load_of_hundreds_of_turns_with_aborts_is_answered_as_by_dense(family: str) -> None:
    found, dense = keep_all(family).answers[LOAD], runs.dense(family).answers[LOAD]
    for ours, theirs in zip(found, dense, strict=True):
        whole = [t for t, answer in enumerate(ours) if answer.finish == theirs[t].finish == "length"]
        assert len(whole) >= 2
        assert [ours[t].tokens for t in whole] == [theirs[t].tokens for t in whole]


@each_family
def test_both_tiers_are_used_and_afterwards_every_slot_is_there(family: str) -> None:
    after, flushed = keep_all(family).observations
    assert len(after["states"]) > 10, "more than the compressed slots hold"
    assert after["checkpoint_free"] + len(after["states"]) == after["checkpoint_slots"]
    assert after["native_free"] == after["native_slots"]
    assert (flushed["native_free"], flushed["checkpoint_free"]) == (after["native_slots"], after["checkpoint_slots"])
    loaded, dense = dense_hits(keep_all(family))
    assert 0 < dense < loaded
    assert "the one in Rust" in keep_all(family).log


def dense_hits(served: Run) -> tuple[int, int]:
    """Loads in all, and those from dense checkpoints, by the last summary in the log."""
    found = re.findall(r"(\d[\d,]*) loaded \((\d[\d,]*) from dense", served.log)[-1]
    loaded, dense = (int(number.replace(",", "")) for number in found)
    return loaded, dense


@pytest.mark.parametrize("phase", [TALK, TALK_AT_ONCE])
def test_hits_of_both_tiers_answer_as_dense_when_compressed_ones_are_refreshed(phase: int) -> None:
    """Either way the answers are those of dense states."""
    found = refreshed().answers[phase]
    assert tokens(found) == tokens(runs.peer_dense("kimi-linear"))
    assert_same_distributions(found, runs.peer_dense("kimi-linear"), runs.peer_dense("kimi-linear", torch.float32))
    plan = build_plan(read_checkpoint(runs.model("kimi-linear")), LONG_WINDOW, dtypes=runs.F32)
    assert not plan.mask.all()
    assert plan.windows.max() >= max(answer.cached_tokens for turns in found for answer in turns) > 0
    loaded, dense = dense_hits(refreshed())
    assert 0 < dense < loaded
    assert re.search(r"[1-9]\d* tokens replayed", refreshed().log)


def test_two_ranks_answer_as_one() -> None:
    assert tokens(real(2).answers[0]) == tokens(real(1).answers[0])


def test_ranks_hold_the_same_tree_and_the_same_states_after_a_load() -> None:
    seen = [{name: value for name, value in each.items() if name != "rank"} for each in real(2).observations]
    ranks = [each["rank"] for each in real(2).observations]
    assert sorted(ranks) == [0, 0, 1, 1]
    by_rank = {rank: [each for each, of in zip(seen, ranks) if of == rank] for rank in (0, 1)}
    assert by_rank[0] == by_rank[1]
    assert len(by_rank[0][0]["states"]) > 3
