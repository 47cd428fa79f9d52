"""Conversations with DASC-WR in SGLang's engine, and the same in dasc's own, from the same weights, tokens and plan."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from dasc.geometry import DtypePolicy
from dasc.models import read_checkpoint
from dasc.models.hybrid import WindowKV
from dasc.plan import SelectionPlan
from dasc.planner import build_plan
from tests.sglang import peer
from tests.sglang.engines import Answer, Conversations, Flush, Run, Step, Turn, environment, run
from tests.sglang.tiny_models import VOCAB, write_model

NEW_TOKENS = 6
OBSERVERS = Path(__file__).parent / "observers"
FP32 = DtypePolicy(torch.float32, torch.float32)


def turn(length: int, generator: torch.Generator) -> Turn:
    return Turn(torch.randint(VOCAB, (length,), generator=generator).tolist(), NEW_TOKENS, top_logprobs=5)


def conversations(seed: int) -> list[list[Turn]]:
    """With windows of 64 the second turn of each hits a prefix shorter than the window, the third a longer one."""
    generator = torch.Generator().manual_seed(seed)
    return [[turn(length, generator) for length in (40 + i, 70, 25)] for i in range(4)]


ONE_AT_A_TIME, FOUR_AT_A_TIME = SCRIPTS = (conversations(1), conversations(2))
each_script = pytest.mark.parametrize("script", [0, 1], ids=["one at a time", "four at a time"])


class Case(NamedTuple):
    """What is served, and how."""

    family: str
    w_max: int = 64
    two_pass: bool = False
    chunk: int = 1024
    ranks: int = 1


class Served:
    """A family's model, a plan, and what SGLang answered with WR. Its last block reads what a block of attention gave.

    Args:
        more: steps after the two scripts, each of which ends with an empty cache.
    """

    def __init__(self, folder: Path, case: Case, more: Sequence[Step] = ()) -> None:
        self.case = case
        self.model = write_model(case.family, folder / "model", blocks=5)
        self.plan = build_plan(read_checkpoint(str(self.model)), case.w_max, ranks=(case.ranks,), dtypes=FP32)
        plan_file = folder / "plan.safetensors"
        self.plan.save(plan_file)
        path = os.pathsep.join([str(OBSERVERS), environment()["PYTHONPATH"]])
        env = {"DASC_PLAN": str(plan_file), "DASC_LOAD_POLICY": "wr", "PYTHONPATH": path, "DASC_LOG_INTERVAL": "1"}
        if case.two_pass:
            env |= {"DASC_REFRESH": "two-pass"}
        if case.ranks > 1:
            env |= {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
        # the second script after a flush: nothing of the first one may be left
        steps = [Conversations(ONE_AT_A_TIME), Flush(), Conversations(FOUR_AT_A_TIME, concurrency=4), Flush(), *more]
        self.run: Run = run(
            self.model, steps, env=env, log_level="info", chunked_prefill_size=case.chunk, tp_size=case.ranks
        )

    @functools.cache  # noqa: B019 - lives as long as the module's tests
    def expected(
        self,
        script: int,
        refresh: bool,
        dense: bool = False,
        window_kv: WindowKV = "replayed",
        talks: int | None = None,
    ) -> list[list[peer.PeerAnswer]]:
        """A script in dasc's own engine, or its first ``talks`` conversations."""
        plan: SelectionPlan | None = None if dense else self.plan
        return peer.converse(
            self.model, SCRIPTS[script][:talks], plan=plan, refresh=refresh, cached=not dense, window_kv=window_kv
        )

    def observations(self, mark: str) -> list[dict[str, Any]]:
        """What the observer said of batches with hits: of the REPLAY before them, or of their FORWARD."""
        return self.run.said(mark)


def furthest(answers: Sequence[Answer], expected: Sequence[peer.PeerAnswer]) -> float:
    """The largest difference of a log-probability."""
    return max(
        abs(value - float(theirs.log_probabilities[place, token]))
        for ours, theirs in zip(answers, expected, strict=True)
        for place, likeliest in enumerate(ours.top_logprobs)
        for token, value in likeliest
    )


def assert_same(served: Served, script: int, window_kv: WindowKV) -> None:
    """Fail unless SGLang answered as dasc's own engine does."""
    expected = served.expected(script, refresh=True, window_kv=window_kv)
    for answers, theirs in zip(served.run.answers[script], expected, strict=True):
        assert [a.tokens for a in answers] == [e.tokens for e in theirs]
        assert [a.cached_tokens for a in answers] == [e.cached_tokens for e in theirs]
        assert furthest(answers, theirs) < 2e-5


def assert_exact_where_windows_are_whole_prefixes(served: Served, script: int) -> None:
    """Fail unless such hits, of which each conversation must have one, are answered as by an engine without a cache.

    Two conversations are compared.
    """
    longest = int(served.plan.windows.max())
    for answers, expected in zip(served.run.answers[script], served.expected(script, False, dense=True, talks=2)):
        exact = [t for t, answer in enumerate(answers) if answer.cached_tokens <= longest]
        assert len(exact) >= 2
        assert [answers[t].tokens for t in exact] == [expected[t].tokens for t in exact]
        assert furthest([answers[t] for t in exact], [expected[t] for t in exact]) < 2e-5


def second_turns(answers: Sequence[Sequence[Any]]) -> list[Any]:
    """The first hit of each conversation."""
    return [turns[1] for turns in answers]


def third_turns(answers: Sequence[Sequence[Any]]) -> list[Any]:
    """The hits on prefixes that are longer than a window of 64."""
    return [turns[2] for turns in answers]
