"""The GPU script over SGLang's pools works, at sizes too small to measure anything, and times nothing that is wrong."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import sglang_pools
from dasc.sglang.pool import CompressedPool

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there it runs with full sizes")


def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, Any]]:
    """Exit status and report of a run with ``--check``."""
    out = tmp_path / "deep" / "pools.json"
    monkeypatch.setattr(sys, "argv", ["sglang_pools", "--check", "--out", str(out)])
    status = sglang_pools.main()
    return status, json.loads(out.read_text())


def test_every_pool_is_checked_and_timed_in_both_directions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    status, report = script(tmp_path, monkeypatch)
    assert status == 0
    assert all(row["ok"] for row in report["gate"])
    for kind in ("gdn", "kda"):
        timed = {(row["pool"], row["what"]) for row in report["times"] if row["kind"] == kind}
        both = {(pool, what) for pool in ("sglang int8", "dasc", "dasc int8", "dasc int4", "dasc all int8")
                for what in ("store", "load")}  # fmt: skip
        assert timed == both | {("dense", "load")}


def test_bytes_are_those_of_the_pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A store reads what it keeps and writes it; a load writes the whole state."""
    _, report = script(tmp_path, monkeypatch)
    moved = {(row["pool"], row["what"]): row["bytes"] for row in report["times"]
             if (row["model"], row["ranks"]) == ("small kda", 1)}  # fmt: skip
    dense = sglang_pools.SMALL["small kda"].dense_bytes()
    small, kept = sglang_pools.SMALL["small kda"], sglang_pools.KEPT
    layout = sglang_pools.compressed_pool(small, 1, kept=kept, quantized=None).layout
    assert moved["dense", "load"] == 2 * dense
    assert moved["dasc", "store"] == 2 * layout.slot_bytes
    assert moved["dasc", "load"] == layout.slot_bytes + dense
    # with every unit kept both store one INT8 a value, one FP32 scale a key channel, and the rows
    assert moved["dasc all int8", "store"] == moved["sglang int8", "store"]
    assert moved["dasc all int8", "load"] == moved["sglang int8", "load"]


@pytest.mark.parametrize("what", ["store_from_active", "load_to_active"])
def test_a_pool_that_is_wrong_is_not_timed(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    right = getattr(CompressedPool, what)
    monkeypatch.setattr(
        CompressedPool, what, lambda self, states, sources, targets: right(self, states, sources.flip(0), targets)
    )
    status, report = script(tmp_path, monkeypatch)
    assert status == 1
    assert [row["ok"] for row in report["gate"]] == [False, False, False, False, True] * 2
    assert report["times"] == []
