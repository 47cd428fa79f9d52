"""DASC-WR in SGLang's engine against dasc's own, in FP32, from the same weights, tokens and plan."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dasc.geometry import DtypePolicy
from dasc.models import read_checkpoint
from dasc.plan import SelectionPlan
from dasc.planner import build_plan
from tests.sglang import peer
from tests.sglang.engines import Answer, Conversations, Flush, Run, Turn, environment, run
from tests.sglang.tiny_models import VOCAB, write_model

W_MAX = 64
NEW_TOKENS = 6
OBSERVERS = Path(__file__).parent / "observers"
FP32 = DtypePolicy(torch.float32, torch.float32)


def conversations(seed: int) -> list[list[Turn]]:
    """The second turn of each hits a prefix shorter than the window, the third a longer one."""
    generator = torch.Generator().manual_seed(seed)

    def turn(length: int) -> Turn:
        return Turn(torch.randint(VOCAB, (length,), generator=generator).tolist(), NEW_TOKENS, top_logprobs=5)

    return [[turn(40 + i), turn(70), turn(25)] for i in range(4)]


SEQUENTIAL, CONCURRENT = conversations(1), conversations(2)


class Served:
    """A family's model, a plan, and what SGLang answered with WR."""

    def __init__(self, folder: Path, family: str, w_max: int, arguments: Mapping[str, Any]) -> None:
        self.model = write_model(family, folder / "model")
        self.ranks = arguments.get("tp_size", 1)
        self.plan = build_plan(read_checkpoint(str(self.model)), w_max, ranks=(self.ranks,), dtypes=FP32)
        plan_file = folder / "plan.safetensors"
        self.plan.save(plan_file)
        path = os.pathsep.join([str(OBSERVERS), environment()["PYTHONPATH"]])
        self.run: Run = run(
            self.model,
            # the same again after a flush: nothing of the first time may be left
            [Conversations(SEQUENTIAL), Flush(), Conversations(CONCURRENT, concurrency=4), Flush()],
            env={"DASC_PLAN": str(plan_file), "DASC_LOAD_POLICY": "wr", "PYTHONPATH": path, "DASC_LOG_INTERVAL": "1"},
            log_level="info",
            chunked_prefill_size=48,
            **arguments,
        )

    @functools.cache  # noqa: B019 - lives as long as the module's tests
    def expected(self, script: int, refresh: bool, dense: bool = False) -> list[list[peer.PeerAnswer]]:
        plan: SelectionPlan | None = None if dense else self.plan
        return peer.converse(self.model, (SEQUENTIAL, CONCURRENT)[script], plan=plan, refresh=refresh, cached=not dense)

    @property
    def observations(self) -> list[dict[str, Any]]:
        mark = "REPLAY OBSERVER "
        return [json.loads(line.split(mark, 1)[1]) for line in self.run.log.splitlines() if mark in line]


CASES = {
    "qwen3-next": ("qwen3-next", W_MAX, {}),
    "kimi-linear, TP 2": ("kimi-linear", W_MAX, {"tp_size": 2}),
    "kimi-linear, windows one by one": ("kimi-linear", 2048, {}),
}


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    family, w_max, arguments = request.param
    with pytest.MonkeyPatch.context() as patch:
        if "tp_size" in arguments:
            patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
        return Served(tmp_path_factory.mktemp("refresh"), family, w_max, arguments)


def furthest(answers: Sequence[Answer], expected: Sequence[peer.PeerAnswer]) -> float:
    """The largest difference of a log-probability."""
    return max(
        abs(value - float(theirs.log_probabilities[place, token]))
        for ours, theirs in zip(answers, expected, strict=True)
        for place, likeliest in enumerate(ours.top_logprobs)
        for token, value in likeliest
    )


@pytest.mark.parametrize("script", [0, 1], ids=["one at a time", "four at a time"])
def test_answers_are_those_of_dascs_own_engine(served: Served, script: int) -> None:
    for answers, expected in zip(served.run.answers[script], served.expected(script, refresh=True), strict=True):
        assert [a.tokens for a in answers] == [e.tokens for e in expected]
        assert [a.cached_tokens for a in answers] == [e.cached_tokens for e in expected]
        assert furthest(answers, expected) < 2e-5


@pytest.mark.parametrize("script", [0, 1], ids=["one at a time", "four at a time"])
def test_a_window_as_long_as_the_prefix_gives_what_nothing_cached_gives(served: Served, script: int) -> None:
    longest = int(served.plan.windows.max())
    for answers, expected in zip(served.run.answers[script], served.expected(script, False, dense=True), strict=True):
        exact = [t for t, answer in enumerate(answers) if answer.cached_tokens <= longest]
        assert len(exact) >= 2
        assert [answers[t].tokens for t in exact] == [expected[t].tokens for t in exact]
        assert furthest([answers[t] for t in exact], [expected[t] for t in exact]) < 2e-5


def test_without_refresh_the_answers_would_be_others(served: Served) -> None:
    """Else the other tests of this module could not fail."""
    hits = [turns[1] for turns in served.run.answers[0]]
    assert furthest(hits, [turns[1] for turns in served.expected(0, refresh=False)]) > 0.01


def test_a_replay_leaves_the_cached_kv_bit_identical(served: Served) -> None:
    for seen in served.observations:
        assert seen["cached_kv_unchanged"]
        assert seen["scratch_kv_written"]
        assert seen["states_written"]
        assert 0 < seen["table_rows"] - 1 - seen["requests_rows"] <= 4
    # two turns of eight conversations, on each rank
    assert sum(seen["hits"] for seen in served.observations) == 16 * served.ranks


def test_the_scratch_is_announced(served: Served) -> None:
    assert "refreshed in two passes" in served.run.log
    assert f"of up to {int(served.plan.windows.max())} tokens" in served.run.log
