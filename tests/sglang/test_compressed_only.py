"""The plugin in compressed-only mode, in the real engine.

With a plan that keeps everything nothing changes. With a real one SGLang answers as dasc's own engine does, and caches
more in the same bytes.

Leaks end an engine run: SGLang checks its pools and its tree whenever it is idle, and here such a find is fatal.
"""

import pytest
import torch

from tests.sglang import loads, runs
from tests.sglang.engines import Answer, Run
from tests.sglang.measures import assert_same_distributions, tokens
from tests.sglang.tiny_models import FAMILIES

pytestmark = pytest.mark.parametrize("family", FAMILIES)
TALK, TALK_AT_ONCE, READ, LOAD = range(4)


def cached(answers: list[list[Answer]]) -> list[list[int]]:
    return [[answer.cached_tokens for answer in turns] for turns in answers]


@pytest.mark.parametrize("phase", [TALK, TALK_AT_ONCE])
def test_a_plan_that_keeps_everything_answers_as_dense(family: str, phase: int) -> None:
    found, dense = runs.keep_all(family).answers[phase], runs.dense(family).answers[phase]
    assert tokens(found) == tokens(dense)
    assert_same_distributions(found, runs.peer_dense(family), runs.peer_dense(family, torch.float32))


def test_a_real_plan_answers_as_dascs_engine_with_the_same_plan(family: str) -> None:
    """DASC-NR: tokens, hits and the distribution of every token."""
    found, peer = runs.real(family).answers[TALK], runs.peer_real(family)
    assert tokens(found) == tokens(peer)
    assert cached(found) == [[answer.cached_tokens for answer in turns] for turns in peer]
    assert_same_distributions(found, peer, runs.peer_real(family, torch.float32))


def test_a_real_plan_is_not_dense(family: str) -> None:
    """Else the test above would show little."""
    with pytest.raises(AssertionError, match="more than"):
        assert_same_distributions(
            runs.real(family).answers[TALK], runs.peer_dense(family), runs.peer_dense(family, torch.float32)
        )


def test_at_equal_slots_as_many_tokens_are_cached_as_dense(family: str) -> None:
    found, dense = cached(runs.keep_all(family).answers[READ]), cached(runs.dense(family).answers[READ])
    assert found == dense
    assert 0 < sum(map(sum, dense)) < sum(len(turn.tokens) for turns in loads.frozen_prompts() for turn in turns)


def test_at_equal_bytes_more_tokens_are_cached_than_dense(family: str) -> None:
    found, dense = runs.real(family).answers[READ], runs.dense(family).answers[READ]
    assert sum(map(sum, cached(found))) > sum(map(sum, cached(dense)))
    plan = runs.real_plan(family)
    [layout] = plan.layouts()
    slots = runs.real(family).observations[0]
    state_bytes = plan.geometry.dense_bytes(plan.dtypes)
    used = (slots["native_slots"] + 1) * state_bytes + (slots["checkpoint_slots"] + 1) * layout.slot_bytes
    assert used <= (loads.SLOTS + 1) * state_bytes


@pytest.mark.parametrize("run", [runs.dense, runs.keep_all, runs.real])
def test_a_load_with_aborts_leaves_every_slot_accounted_for_and_a_flush_frees_all(family: str, run: Run) -> None:
    """Fault 8. 180 requests, eight clients, four at once, more states than there is room for."""
    served = run(family)
    for turns, answers in zip(loads.load(), served.answers[LOAD]):
        assert [answer.finish for answer in answers] == ["length" if t.abort_after is None else "abort" for t in turns]
    after, flushed = served.observations
    states, held = len(after["states"]), flushed["checkpoint_slots"]
    assert states > 0
    if held is None:
        assert after["native_free"] + states == after["native_slots"]
    else:
        assert after["native_free"] == after["native_slots"]
        assert after["checkpoint_free"] + states == held
    assert flushed["states"] == []
    assert (flushed["native_free"], flushed["checkpoint_free"]) == (flushed["native_slots"], held)


def test_under_load_a_plan_that_keeps_everything_answers_as_dense(family: str) -> None:
    """Token for token, up to where a conversation's two likeliest tokens are too near each other for FP32 to tell."""
    found, dense = runs.keep_all(family).answers[LOAD], runs.dense(family).answers[LOAD]
    compared = 0
    for ours, theirs in zip(found, dense):
        told = told_tokens(theirs)
        assert [token for answer in ours for token in answer.tokens][: len(told)] == told
        compared += len(told)
    assert compared > 0.9 * sum(len(answer.tokens) for turns in dense for answer in turns if answer.finish == "length")


def told_tokens(answers: list[Answer]) -> list[int]:
    """Tokens of a conversation's complete answers before the first near tie."""
    told = []
    for answer in answers:
        for token, ((_, first), (_, second)) in zip(answer.tokens, answer.top_logprobs):
            if first - second < 1e-4:
                return told
            told.append(token)
    return told
