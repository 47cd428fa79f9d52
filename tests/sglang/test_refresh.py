"""DASC-WR in two passes in SGLang's engine against dasc's own, in FP32."""

from __future__ import annotations

import pytest

from tests.sglang.refreshing import (
    Case,
    Served,
    assert_exact_where_windows_are_whole_prefixes,
    assert_same,
    each_script,
    furthest,
    second_turns,
)

CASES = {
    "qwen3-next": Case("qwen3-next", two_pass=True, chunk=48),
    "kimi-linear, TP 2": Case("kimi-linear", two_pass=True, chunk=48, ranks=2),
    # in chunks that leave no room for a window, where one pass was allowed
    "kimi-linear, windows one by one": Case("kimi-linear", w_max=2048, chunk=48),
}


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("refresh"), request.param)


@each_script
def test_answers_are_those_of_dascs_own_engine(served: Served, script: int) -> None:
    assert_same(served, script, "replayed")


def test_a_window_as_long_as_the_prefix_gives_what_nothing_cached_gives(served: Served) -> None:
    assert_exact_where_windows_are_whole_prefixes(served, script=1)


def test_without_refresh_the_answers_would_be_others(served: Served) -> None:
    """Else the other tests of this module could not fail."""
    hits = second_turns(served.run.answers[0][:1])
    assert furthest(hits, second_turns(served.expected(0, refresh=False, talks=1))) > 0.01


def test_a_replay_leaves_the_cached_kv_bit_identical(served: Served) -> None:
    seen = served.observations("REPLAY")
    for replay in seen:
        assert replay["cached_kv_unchanged"]
        assert replay["scratch_kv_written"]
        assert replay["states_written"]
        assert 0 < replay["table_rows"] - 1 - replay["requests_rows"] <= 4
    # two turns of eight conversations, on each rank
    assert sum(replay["hits"] for replay in seen) == 16 * served.case.ranks


def test_the_log_says_that_it_takes_two_passes_and_why(served: Served) -> None:
    why = "refreshed in two passes: DASC_REFRESH" if served.case.two_pass else "two passes for a batch with compressed"
    assert served.run.log.count(why) == 1
    assert f"of up to {int(served.plan.windows.max())} tokens" in served.run.log
