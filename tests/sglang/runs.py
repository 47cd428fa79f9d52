"""The engine runs that tests share: each configuration is served once in a session of tests."""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from pathlib import Path

import torch

from dasc.geometry import DtypePolicy
from dasc.models import read_checkpoint
from dasc.plan import SelectionPlan
from dasc.planner import build_plan
from tests.sglang import loads, peer
from tests.sglang.engines import Run, Step, run
from tests.sglang.peer import PeerAnswer
from tests.sglang.tiny_models import write_model

W_MAX = 64
F32 = DtypePolicy(torch.float32, torch.float32)
_folder = tempfile.TemporaryDirectory(prefix="dasc-sglang-")


@functools.cache
def model(family: str) -> Path:
    """Folder of the tiny model."""
    return write_model(family, Path(_folder.name) / family)


def real_plan(family: str) -> SelectionPlan:
    """Keeps some units of each layer and omits others."""
    return build_plan(read_checkpoint(model(family)), W_MAX, ranks=(1, 2), dtypes=F32)


@functools.cache
def keep_all_plan(family: str) -> Path:
    """The file of a plan that keeps every unit."""
    plan = build_plan(read_checkpoint(model(family)), W_MAX, ranks=(), dtypes=F32)
    every = dataclasses.replace(plan, mask=torch.ones_like(plan.mask), windows=torch.zeros_like(plan.windows))
    path = Path(_folder.name) / f"{family}.keep-all.safetensors"
    every.save(path)
    return path


@functools.cache
def dense(family: str) -> Run:
    """SGLang as it is."""
    return run(model(family), [*loads.phases(), *loads.cold(prompts(family))], max_mamba_cache_size=loads.SLOTS)


@functools.cache
def dense_two_ranks(family: str) -> Run:
    """The same weights over two ranks, with prompts in chunks of 32 tokens."""
    steps: list[Step] = loads.phases()[:3]
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    return run(model(family), steps, env=env, tp_size=2, chunked_prefill_size=32)


@functools.cache
def keep_all(family: str) -> Run:
    """Compressed-only with a plan that omits nothing, and as many slots as the dense server has."""
    env = {"DASC_PLAN": str(keep_all_plan(family)), "DASC_POOL": str(loads.SLOTS)}
    return run(model(family), loads.phases(), env=env, max_mamba_cache_size=loads.SLOTS + 7)


@functools.cache
def real(family: str) -> Run:
    """Compressed-only with a real plan, made at start, in the bytes that the dense server has."""
    env = {"DASC_PLAN": "auto", "DASC_W_MAX": str(W_MAX)}
    return run(model(family), loads.phases(), env=env, max_mamba_cache_size=loads.SLOTS)


@functools.cache
def peer_dense(family: str, dtype: torch.dtype = torch.float64) -> list[list[PeerAnswer]]:
    """The conversations in dasc's engine with whole states."""
    return peer.converse(model(family), loads.conversations(), dtype=dtype)


@functools.cache
def peer_real(family: str, dtype: torch.dtype = torch.float64) -> list[list[PeerAnswer]]:
    """The conversations in dasc's engine with checkpoints of the real plan."""
    return peer.converse(model(family), loads.conversations(), plan=real_plan(family), dtype=dtype)


def prompts(family: str) -> list[list[int]]:
    """Every prompt of the conversations, answers before it included."""
    found = []
    for turns, answers in zip(loads.conversations(), peer_dense(family)):
        history: list[int] = []
        for turn, answer in zip(turns, answers):
            history = [*history, *turn.tokens]
            found.append(history)
            history = [*history, *answer.tokens]
    return found
