"""``dasc simulate`` and ``dasc calibrate`` as a user meets them: tables, JSON, figures and clear errors."""

import dataclasses
import errno
import json
import os
import sys
from pathlib import Path

import pytest

from dasc.cache import CacheConfig
from dasc.cache.simulation import MODEL_SIZES, CostModel, Serving, estimate_cost, shared_prefix_load, simulate
from dasc.cli.main import main
from tests.cache.traces import TRACE, needs_trace
from tests.cli.commands import run

SMALL = ("shared-prefix", "--tp", "2", "--memory", "2GiB")


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The command as a shell sees it: exit status and standard error."""

    def call(*args: str | Path) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", ["dasc", *map(str, args)])
        with pytest.raises(SystemExit) as stopped:
            main()
        return stopped.value.code, capsys.readouterr().err

    return call


def run_json(*args: str | Path) -> dict:
    result = run("simulate", *args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Forty conversations of three turns, a second apart."""
    lines = []
    for turn in range(3):
        for conversation in range(40):
            blocks = [0, *(100 * conversation + i for i in range(1, 3 + 2 * turn))]
            entry = {
                "timestamp": 1000 * (40 * turn + conversation),
                "input_length": 512 * len(blocks) - 100,
                "output_length": 20,
                "hash_ids": blocks,
            }
            lines.append(json.dumps(entry))
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(lines))
    return file


def test_every_arm_is_reported_under_the_same_memory():
    report = run_json(*SMALL)
    arms = [r["arm"] for r in report["results"]]
    assert arms == ["dense", "padded", "ragged", "int8", "int4", "storage", "wr"]
    assert {r["memory_bytes"] for r in report["results"]} == {2 << 30}
    assert (report["model"], report["w_max"], report["ranks"], report["load"]) == (
        "kimi-linear",
        16,
        2,
        "shared-prefix",
    )
    assert report["serving"]["concurrency"] == 16
    assert report["costs"]["step_s"] == pytest.approx(27 * 150e-6)
    dense, ragged = report["results"][0], report["results"][2]
    assert ragged["slot_bytes"] == 7_570_944 + 737_280
    assert dense["native_slots"] == (2 << 30) // 21_708_800 - 1
    assert ragged["token_hit_rate"] > dense["token_hit_rate"]
    for name in (
        "request_hit_rate",
        "ttft_p95_s",
        "e2e_p95_s",
        "evictions",
        "demotions",
        "forced_waits",
        "moved_bytes",
    ):
        assert name in dense


def test_the_table_names_what_was_simulated_and_that_costs_are_estimates():
    result = run("simulate", *SMALL, "--arms", "dense,ragged")
    assert result.exit_code == 0, result.output
    for expected in ("kimi-linear, W_max 16, TP 2, shared-prefix: 184 requests", "ragged", "2.00 GiB", "dense_lru",
                     "estimates", "requests simulated a second"):  # fmt: skip
        assert expected in result.stdout
    assert "padded" not in result.stdout
    assert "Every eviction is by kv" not in result.stdout


def test_constants_that_are_still_estimates_are_named(tmp_path: Path):
    names = [field.name for field in dataclasses.fields(CostModel)]
    left = ["two_pass_s", "two_pass_s_per_token"]
    file = tmp_path / "cost.json"
    file.write_text(json.dumps({name: 0.001 for name in names if name not in left}))
    small = (*SMALL, "--arms", "dense", "--cost", file)
    assert "These costs (two_pass_s, two_pass_s_per_token) are estimates" in run("simulate", *small).stdout
    assert run_json(*small)["estimated_costs"] == left
    assert "estimates" not in run("simulate", *small, *(f"--cost={name}=0" for name in left)).stdout


def test_kv_is_named_when_it_is_all_that_limits_hits():
    result = run("simulate", "wildchat", "--memory", "64GiB", "--kv-memory", "500MiB", "--arms", "dense,ragged")
    assert result.exit_code == 0, result.output
    assert " kv" in result.stdout
    assert "KV memory, not state memory, limits hits here" in result.stdout


def test_a_trace_comes_at_its_own_times_or_as_fast_as_clients_ask(trace: Path):
    args = (trace, "--tp", "8", "--memory", "512MiB", "--arms", "ragged")
    (own,) = run_json(*args)["results"]
    (faster,) = run_json(*args, "--time-scale", "0.5")["results"]
    (closed,) = run_json(*args, "--concurrency", "40")["results"]
    assert own["requests"] == 120
    assert own["seconds"] == pytest.approx(119, abs=2)
    assert faster["seconds"] == pytest.approx(59.5, abs=2)
    assert closed["seconds"] < 20
    assert own["token_hit_rate"] > 0.3


def test_a_sweep_reports_each_memory_and_draws_it(trace: Path, tmp_path: Path):
    folder = tmp_path / "out" / "sweep"
    report = run_json(trace, "--sweep", "1GiB,512MiB,1GiB", "--arms", "dense,int4,wr", "-o", folder)
    assert [(r["memory_bytes"] >> 20, r["arm"]) for r in report["results"]] == [
        (memory, arm) for memory in (512, 1024) for arm in ("dense", "int4", "wr")
    ]
    assert json.loads((folder / "simulate.json").read_text()) == report
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "sweep.svg").read_text()
    assert {f.name for f in folder.iterdir()} == {"simulate.json", "sweep.png", "sweep.svg"}


def test_refresh_in_a_second_pass_costs_more():
    one, two = (
        run_json(*SMALL, "--arms", "wr", "--refresh", way)["results"][0]["ttft_mean_s"]
        for way in ("one-pass", "two-pass")
    )
    assert two > one + 0.02


def test_a_seed_fixes_the_report():
    def numbers(seed: str) -> list[dict]:
        results = run_json(*SMALL, "--arms", "dense,ragged", "--seed", seed)["results"]
        return [{k: v for k, v in r.items() if k != "wall_s"} for r in results]

    assert numbers("1") == numbers("1") != numbers("2")


@needs_trace
def test_the_real_trace_gains_from_compression():
    report = run_json(TRACE, "--memory", "1GiB", "--arms", "dense,int8")
    dense, int8 = report["results"]
    assert dense["requests"] == 6000
    assert int8["token_hit_rate"] > 1.5 * dense["token_hit_rate"]
    assert int8["ttft_mean_s"] < dense["ttft_mean_s"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["no/such/trace.jsonl"],
            "no/such/trace.jsonl': expected a TRACE, or a built-in load: shared-prefix or wildchat",
        ),
        (["BROKEN"], "broken.jsonl, line 2: not JSON"),
        (["TRACE", "--memory", "1MiB"], "arm dense: a budget of 1048576 bytes is too small"),
        (["TRACE", "--memory", "lots"], "expected a size"),
        (["TRACE", "--sweep", "1GiB,lots"], "expected a size"),
        (["TRACE", "--kv-memory", "8KiB"], "KV memory must hold 512 tokens, which take 4128768"),
        (["TRACE", "--kv-memory", "10MiB"], "KV for 1024 tokens is too small: a request takes 3584"),
        (["TRACE", "--arms", "dense,sparse"], "got 'sparse'"),
        (["TRACE", "--tp", "3"], "cannot be shared equally by 3 ranks\n"),
        (["TRACE", "--model", "no/such/model"], "no/such/model"),
        (["TRACE", "--w-max", "3"], "w-max"),
        (["TRACE", "--cost", "speed=1"], "unknown cost 'speed'"),
        (["TRACE", "--cost", "step_s=-1"], "step_s"),
        (["TRACE", "--cost", "no/such/cost.json"], "no/such/cost.json"),
        (["TRACE", "--memory", "1GiB", "--sweep", "1GiB"], "either --memory or --sweep"),
        (["TRACE", "--time-scale", "0"], "time_scale"),
        (["TRACE", "--time-scale", "2", "--concurrency", "4"], "--time-scale"),
        (["TRACE", "--block-tokens", "100"], "line 1"),
        (["--published", "--tp", "2"], "--published takes only -o and --json, got --tp as well"),
        (["wildchat", "--published"], "got wildchat as well"),
        (["shared-prefix", "--seed", "-1"], "--seed"),
        (["TRACE", "--cost", "step_s=1e7"], "cost step_s must be from 0 to 1000000 s"),
        (["TRACE", "--arms", "dense", "-o", "TRACE/out"], "trace.jsonl"),
    ],
)
def test_wrong_input_ends_with_status_2_and_one_line(
    trace: Path, tmp_path: Path, shell, monkeypatch: pytest.MonkeyPatch, args: list[str], message: str
):
    broken = tmp_path / "broken.jsonl"
    broken.write_text(trace.read_text().splitlines()[0] + "\n{\n")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    status, error = shell("simulate", *(a.replace("TRACE", str(trace)).replace("BROKEN", str(broken)) for a in args))
    assert status == 2
    assert message in error
    assert len([line for line in error.splitlines() if line.startswith(("dasc:", "Error:"))]) == 1


@pytest.mark.parametrize("command", ["simulate", "calibrate"])
def test_a_full_disk_is_reported_in_one_line_and_leaves_what_was_there(
    tmp_path: Path, records: Path, shell, monkeypatch: pytest.MonkeyPatch, command: str
):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("dasc.eval.files.os.fsync", full)
    file = tmp_path / "out" / f"{command}.json"
    file.parent.mkdir()
    file.write_text("old")
    args = {"simulate": (*SMALL, "--arms", "dense", "-o", file.parent), "calibrate": (records, "-o", file)}
    status, error = shell(command, *args[command])
    assert (status, error) == (2, "dasc: [Errno 28] No space left on device\n")
    assert {path.name: path.read_text() for path in file.parent.iterdir()} == {file.name: "old"}


@pytest.fixture
def records(tmp_path: Path) -> Path:
    config = CacheConfig(
        native_slots=20, compressed_slots=60, kv_pages=1 << 20, native_slot_bytes=100, compressed_slot_bytes=40
    )
    cost = estimate_cost(MODEL_SIZES["kimi_linear"], 2)
    result = simulate(shared_prefix_load(0), config, cost, Serving(16, 16, mixed_passes=True), record=True)
    file = tmp_path / "records.json"
    data = {"steps": [dataclasses.asdict(s) for s in result.steps],
            "transfers": [dataclasses.asdict(t) for t in result.transfers]}  # fmt: skip
    file.write_text(json.dumps(data))
    return file


def test_calibrated_costs_go_straight_into_a_simulation(records: Path, tmp_path: Path):
    file = tmp_path / "cost.json"
    result = run("calibrate", records, "-o", file)
    assert result.exit_code == 0, result.output
    for expected in ("step_s: ", "records fitted to 0.0% in the mean", "do not tell apart", "no record of: "):
        assert expected in result.stdout
    costs = json.loads(file.read_text())
    assert costs["step_s"] == pytest.approx(27 * 150e-6, rel=1e-4)
    for name in ("two_pass_s", "load_latency_s", "load_s_per_byte"):  # all loads are of one size
        assert name not in costs, "what was not measured stays an estimate"
    report = run_json(*SMALL, "--arms", "dense", "--cost", file, "--cost", "copy_latency_s=0.5")
    assert report["costs"]["step_s"] == costs["step_s"]
    assert report["costs"]["load_latency_s"] == estimate_cost(MODEL_SIZES["kimi_linear"], 2).load_latency_s > 0
    assert report["costs"]["copy_latency_s"] == 0.5
    as_json = json.loads(run("calibrate", records, "--json").stdout)
    assert as_json["costs"] == costs
    assert as_json["fits"][0]["kind"] == "step"
    assert "two_pass_s" in as_json["unmeasured"]


def test_records_that_cannot_be_used_end_with_status_2_and_one_line(tmp_path: Path, shell):
    file = tmp_path / "records.json"
    file.write_text('{"steps": [{}]}')
    for path, message in ((file, "steps[0] must be an object of"), (tmp_path / "none.json", "none.json")):
        status, error = shell("calibrate", path)
        assert status == 2
        assert message in error
        assert error.count("\n") == 1
