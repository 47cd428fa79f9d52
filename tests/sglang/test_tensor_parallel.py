"""Placements over two ranks in SGLang's engine: other ranks store units, or compute heads, and nobody can tell."""

from __future__ import annotations

import dataclasses
import functools
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dasc.geometry import StateGeometry
from dasc.plan import SelectionPlan
from dasc.reference import place
from dasc.sglang.placements import buffer_bytes
from tests.sglang import loads, peer, runs
from tests.sglang.engines import Conversations, Flush, Observe, Run, Step, environment, run
from tests.sglang.measures import tokens
from tests.sglang.tiny_models import FAMILIES

RANKS = 2
MODES = ("off", "storage", "hybrid")
POOL = loads.SLOTS
OBSERVERS = Path(__file__).parent / "rank_observers"
STEPS: list[Step] = [
    Conversations(loads.conversations()),
    Flush(),
    Conversations(loads.frozen_prompts()),
    Flush(),
    Conversations(loads.load()[:40], concurrency=8),
    Observe(),
    Flush(),
    Observe(),
]
TALK, READ, LOAD = range(3)
_folder = tempfile.TemporaryDirectory(prefix="dasc-tensor-parallel-")


def lumps(geometry: StateGeometry) -> Tensor:
    """One whole bundle a layer, all on rank 0. Three bundles for two ranks: in no order of the heads is it even."""
    mask = torch.zeros(geometry.num_layers, geometry.num_key_heads, geometry.units_per_layer // geometry.num_key_heads)
    for layer, bundle in enumerate((0, 1, 0)):
        mask[layer, bundle] = 1
    return mask.bool().flatten(1)


@functools.cache
def plan(family: str, mode: str) -> SelectionPlan:
    real = runs.real_plan(family)
    mask = lumps(real.geometry)
    windows = torch.full_like(real.windows, real.w_max).masked_fill(mask, 0)
    placements = {RANKS: place(real.geometry, mask, RANKS, mode)}
    return dataclasses.replace(real, mask=mask, windows=windows, placements=placements)


@functools.cache
def plan_file(family: str, mode: str) -> Path:
    path = Path(_folder.name) / f"{family}.{mode}.safetensors"
    plan(family, mode).save(path)
    return path


@functools.cache
def served(family: str, mode: str, ranks: int = RANKS) -> Run:
    return serve(family, mode, STEPS, ranks=ranks)


def serve(family: str, mode: str, steps: Sequence[Step], ranks: int = RANKS, **more: str) -> Run:
    env = environment_of(family, mode) | more
    if ranks == 1:
        del env["SGLANG_CPU_OMP_THREADS_BIND"]
    return run(runs.model(family), steps, env=env, tp_size=ranks, max_mamba_cache_size=loads.SLOTS)


def environment_of(family: str, mode: str) -> dict[str, str]:
    return {
        "DASC_PLAN": str(plan_file(family, mode)),
        "DASC_POOL": str(POOL),
        "PYTHONPATH": os.pathsep.join([str(OBSERVERS), environment()["PYTHONPATH"]]),
        "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
        "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1",
    }


def observed(found: Run) -> list[list[dict[str, Any]]]:
    """What each rank said, in the order said."""
    return [[line for line in found.said("RANK") if line["rank"] == rank] for rank in range(RANKS)]


def at_the_end(found: Run) -> list[dict[str, Any]]:
    """What each rank said last."""
    return [said[-1] for said in observed(found)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_answer_as_one_with_the_same_plan(family: str, mode: str) -> None:
    """One request after another, with hits, evictions and omitted units."""
    one, two = served(family, "off", ranks=1), served(family, mode)
    for phase in (TALK, READ):
        assert tokens(two.answers[phase]) == tokens(one.answers[phase])
        cached = [[[a.cached_tokens for a in turns] for turns in found.answers[phase]] for found in (one, two)]
        assert cached[0] == cached[1]
        assert sum(map(sum, cached[0])) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_without_these_units_would_answer_otherwise(family: str) -> None:
    """Else the tests above would show little."""
    assert tokens(served(family, "off", ranks=1).answers[TALK]) != tokens(runs.peer_dense(family))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_units_move_as_planned(family: str, mode: str) -> None:
    placement = plan(family, mode).placements[RANKS]
    assert placement.permutes_heads == (mode == "hybrid")
    assert (placement.moved_units > 0) == (mode != "off")
    said = at_the_end(served(family, mode))
    assert max(seen["buffer_bytes"] for seen in said) == buffer_bytes(plan(family, mode), RANKS)
    for rank, (seen, layout) in enumerate(zip(said, plan(family, mode).layouts(RANKS))):
        assert (seen["own_units"], seen["slot_units"]) == (placement.local_units[rank], layout.slot_units)
        if mode == "off":
            assert "stores" not in seen
            continue
        moved = placement.moved_units
        away, back = ("sent_units", "received_units") if rank == 0 else ("received_units", "sent_units")
        assert seen["stores"]["stored"] > 100
        assert seen["loads"]["loaded"] > 50
        assert seen["stores"][away] == seen["stores"]["stored"] * moved
        assert seen["loads"][back] == seen["loads"]["loaded"] * moved
        assert (seen["stores"][back], seen["loads"][away]) == (0, 0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_both_ranks_hold_the_same_tree_and_slots_after_a_load(family: str, mode: str) -> None:
    """Concurrent requests, aborts, more states than there is room for; then all is free again (fault 8).

    SGLang's own checker, which the engine runs with, ends the server when ranks decide differently on the way.
    """
    found = served(family, mode)
    assert sum(len(turns) for phase in found.answers for turns in phase) > 100
    assert all(seen["checked"] for seen in at_the_end(found))
    parts = ("states", "kv", "native_free", "checkpoints_free")
    first, second = ([{part: line[part] for part in parts} for line in said] for said in observed(found))
    assert len(first) == 2
    assert first == second
    loaded, flushed = first
    assert len(loaded["states"]) == POOL - loaded["checkpoints_free"] > 0
    assert (flushed["states"], flushed["kv"], flushed["checkpoints_free"]) == ([], [], POOL)
    assert flushed["native_free"] == loaded["native_free"]


def test_with_two_tiers_units_move_at_demotion_and_two_ranks_answer_as_one() -> None:
    family = "qwen3-next"
    found = serve(family, "storage", [STEPS[TALK], Observe()], DASC_MODE="two-tier")
    assert tokens(found.answers[TALK]) == tokens(served(family, "off", ranks=1).answers[TALK])
    assert all(seen["stores"]["stored"] > 0 < seen["loads"]["loaded"] for seen in at_the_end(found))


def test_with_refresh_stored_units_go_over_the_refreshed_ones_in_the_order_of_heads() -> None:
    family = "kimi-linear"
    found = serve(family, "hybrid", [STEPS[TALK], Observe()], DASC_LOAD_POLICY="wr")
    expected = peer.converse(runs.model(family), loads.conversations(), plan=plan(family, "off"), refresh=True)
    assert tokens(found.answers[TALK]) == tokens(expected)
    assert all(seen["loads"]["loaded"] > 0 for seen in at_the_end(found))


def test_ranks_with_different_plans_stop_the_server_with_one_line() -> None:
    family = FAMILIES[0]
    env = environment_of(family, "storage") | {"PLAN_OF_RANK_1": str(plan_file(family, "hybrid"))}
    ended = run(runs.model(family), STEPS, env=env, tp_size=RANKS, may_fail=True)
    reason = ended.refused()
    assert reason.startswith("dasc: ranks disagree: the order of heads is ")
    assert "the placement is storage on rank 0 and hybrid on rank 1" in reason
