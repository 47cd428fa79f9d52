"""DASC-WR in one pass in SGLang's engine against dasc's own, in FP32."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from tests.sglang.engines import Conversations, Flush, Step
from tests.sglang.refreshing import (
    Case,
    Served,
    assert_exact_where_windows_are_whole_prefixes,
    assert_same,
    each_script,
    furthest,
    second_turns,
    third_turns,
    turn,
)

HIT, COLD = 3, 4  # steps with conversations


def scored() -> list[Step]:
    """A hit that asks for log-probabilities of its prompt, and the same prompt with nothing cached."""
    whole = turn(70, torch.Generator().manual_seed(3))
    start = dataclasses.replace(whole, tokens=whole.tokens[:40])
    asks = Conversations([[dataclasses.replace(whole, prompt_logprobs_from=50)]])
    return [Conversations([[start]]), asks, Flush(), asks]


@pytest.fixture(scope="module", params=["qwen3-next", "kimi-linear"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("one-pass"), Case(request.param), scored())


@each_script
def test_answers_are_those_of_dascs_own_engine(served: Served, script: int) -> None:
    assert_same(served, script, "cached")


def test_a_window_as_long_as_the_prefix_gives_what_nothing_cached_gives(served: Served) -> None:
    assert_exact_where_windows_are_whole_prefixes(served, script=1)


def test_without_refresh_or_in_two_passes_the_answers_would_be_others(served: Served) -> None:
    """Else the other tests of this module could not fail."""
    talk, talks = served.run.answers[0][:1], 1
    assert furthest(second_turns(talk), second_turns(served.expected(0, refresh=False, talks=talks))) > 1e-3
    if served.case.family == "kimi-linear":  # few units of the other are behind attention: its forms agree to 1e-5
        replayed = served.expected(0, refresh=True, window_kv="replayed", talks=talks)
        assert furthest(third_turns(talk), third_turns(replayed)) > 1e-4


def test_log_probabilities_of_a_prompt_are_those_of_its_new_tokens(served: Served) -> None:
    """A window is as long as what is cached here, so that the same prompt with nothing cached gives the same."""
    [[hit]], [[cold]] = served.run.answers[HIT], served.run.answers[COLD]
    assert (hit.cached_tokens, cold.cached_tokens) == (40, 0)
    assert len(hit.prompt_logprobs) == 20
    # SGLang has none for the first token that is asked for
    assert hit.prompt_logprobs[1:] == pytest.approx(cold.prompt_logprobs[1:], abs=2e-5)


def test_windows_join_batches_which_nobody_sees_and_leave_the_cached_kv_bit_identical(served: Served) -> None:
    seen = served.observations("FORWARD")
    assert sum(forward["hits"] for forward in seen) == 17
    assert all(forward["other_kv_unchanged"] and forward["loaded"] for forward in seen)
    assert all(forward["batch_unchanged"] for forward in seen)
    widened = [forward for forward in seen if forward["tokens"] > forward["new_tokens"]]
    assert max(forward["hits"] for forward in widened) > 1
    assert not any(forward["scratch_kv_written"] for forward in widened)
    for forward in [forward for forward in seen if forward not in widened]:
        # latent attention over a window that is all there is
        assert forward["hits"] == forward["requests"]
        assert served.case.family == "kimi-linear"


def test_the_log_says_that_it_takes_one_pass(served: Served) -> None:
    assert served.run.log.count("dasc: compressed hits are refreshed in one pass") == 1
    for reason in re.findall("two passes for a batch with compressed hits: (.*)", served.run.log):
        assert "latent attention" in reason
    seconds = "passes of their own" in served.run.log
    assert seconds == (served.case.family == "kimi-linear")
