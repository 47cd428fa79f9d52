"""Requests that SGLang takes back in the middle of an answer, and starts again from what the cache holds of them."""

from __future__ import annotations

import pytest

from tests.sglang import loads, runs
from tests.sglang.engines import Conversations, Flush, Observe, run
from tests.sglang.measures import tokens

MODES = {"compressed-only": "kimi-linear", "two-tier": "qwen3-next"}


@pytest.mark.parametrize("mode", MODES)
def test_retracted_requests_are_answered_as_by_dense_and_no_slot_is_lost(mode: str) -> None:
    """SGLang's own switch for tests retracts at every third step. The plan omits nothing."""
    family = MODES[mode]
    env = {"DASC_PLAN": str(runs.keep_all_plan(family)), "DASC_MODE": mode, "SGLANG_TEST_RETRACT": "1"}
    steps = [Conversations(loads.conversations(), concurrency=3), Observe(), Flush(), Observe()]
    found = run(runs.model(family), steps, env=env, max_mamba_cache_size=loads.SLOTS, log_level="info")
    assert found.log.count("Testing retraction") > 3
    assert tokens(found.answers[0]) == tokens(runs.peer_dense(family))
    loaded, flushed = found.observations
    assert len(loaded["states"]) > 0
    assert loaded["checkpoint_free"] + len(loaded["states"]) == loaded["checkpoint_slots"]
    assert (flushed["native_free"], flushed["checkpoint_free"]) == (loaded["native_slots"], loaded["checkpoint_slots"])
