"""The GPU benchmark works from end to end, and shows no speed when the kernels are wrong."""

import json
import sys

import pytest

from benchmarks.gpu import run
from dasc import fast


@pytest.fixture
def arguments(monkeypatch, tmp_path):
    out = tmp_path / "gpu.json"
    monkeypatch.setattr(sys, "argv", ["run.py", "--check", "--out", str(out)])
    return out


def test_every_kernel_passes_the_gate_and_is_timed(arguments, capsys):
    assert run.main() == 0
    report = json.loads(arguments.read_text())
    assert len(report["gate"]) == 18
    assert {(row["what"], row["kind"]) for row in report["times"]} >= {
        (what, kind) for what in ("prefill", "decode") for kind in ("gdn", "kda")
    }
    assert {"pack", "unpack_zero", "unpack_leave"} <= {row["what"] for row in report["times"]}
    assert "gate: 18 of 18" in capsys.readouterr().out


def test_a_wrong_kernel_ends_the_run_before_any_speed(arguments, capsys, monkeypatch):
    right = fast.decode_kda
    monkeypatch.setattr(run, "gate_packing", lambda report, small: None)
    monkeypatch.setattr(fast, "decode_kda", lambda *a, **k: right(*a, **k) * 1.001)
    assert run.main() == 1
    report = json.loads(arguments.read_text())
    assert report["times"] == []
    assert [row["name"] for row in report["gate"] if not row["ok"]] == ["decode_kda"]
    assert "share_of" not in capsys.readouterr().out
