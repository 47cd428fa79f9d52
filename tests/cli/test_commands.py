"""The commands as a user meets them: a checkpoint in the real format in, tables, JSON, files and clear errors out."""

import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from dasc.cli.main import app
from dasc.cli.options import ByteSize
from dasc.geometry import DtypePolicy
from dasc.models import CheckpointError, read_checkpoint
from dasc.models.synthetic import GEOMETRIES, example_gate, published_kimi_linear, write_checkpoint
from dasc.plan import SelectionPlan
from dasc.units import format_bytes
from tests.cli.commands import run


def dasc(*args: str | Path, **kwargs) -> subprocess.CompletedProcess[str]:
    """The command as its own process: exit status and standard error as a shell sees them."""
    command = [sys.executable, "-m", "dasc", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **kwargs)


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "kimi-linear"
    assert run("example", "kimi-linear", "-o", folder).exit_code == 0
    return folder


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "qwen3-next"
    assert run("example", "qwen3-next", "-o", folder).exit_code == 0
    return folder


def plan_json(*args: str | Path) -> dict:
    result = run("plan", *args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_plan_reproduces_the_published_kimi_linear_figures(kimi: Path):
    report = plan_json(kimi, "--w-max", "16", "--tp", "1,2")
    (window,) = report["windows"]
    assert (window["units_kept"], window["units"]) == (29_389, 81_920)
    assert round(window["c_temp_ragged"], 3) == 2.787
    assert round(window["c_temp_padded"], 3) == 1.791
    assert round(window["c_ckpt"], 3) == 2.628
    assert [round(x, 3) for x in window["layer_fraction"]] == [0.179, 0.558]
    ranks = {(r["ranks"], r["mode"]): r for r in window["ranks"]}
    assert round(ranks[2, "off"]["compression"], 3) == 2.613
    assert round(ranks[2, "storage"]["compression"], 3) == 2.628
    assert ranks[2, "storage"]["moved_units"] == 92
    assert ranks[2, "off"]["slot_bytes"] == 7_570_944 + 737_280
    assert report["dense_bytes"] == 43_417_600


def test_plan_int8_reproduces_the_published_ratio(kimi: Path):
    assert round(plan_json(kimi, "--w-max", "16", "--tp", "1", "--int8")["windows"][0]["c_ckpt"], 2) == 8.11


def test_plan_int4_is_stored_shown_and_excludes_int8(kimi: Path, tmp_path: Path):
    path = tmp_path / "a.plan"
    report = plan_json(kimi, "--w-max", "16", "--tp", "1", "--int4", "-o", path)
    assert report["stored_dtype"] == "int4"
    assert report["windows"][0]["checkpoint_bytes"] == 29_389 * (64 + 4) + 1_474_560
    assert "Kept by W_max (ragged, INT4)" in run("plan", kimi, "--w-max", "16", "--tp", "1", "--int4").output
    shown = json.loads(run("show", path, "--json").output)
    assert (shown["temporal_dtype"], shown["stored_dtype"]) == ("float32", "int4")
    result = run("plan", kimi, "--int8", "--int4")
    assert (result.exit_code, "either --int8 or --int4, not both" in result.stderr) == (2, True)


def test_plan_prints_every_row_of_the_table(kimi: Path):
    result = run("plan", kimi, "--tp", "1,2")
    assert result.exit_code == 0, result.output
    for expected in ("29,389", "35.9%", "2.787", "1.791", "2.628", "20 KDA layers of 27 blocks", "41.41 MiB", "92"):
        assert expected in result.output


def test_plan_of_a_gdn_model_has_no_mixed_pairs(qwen: Path):
    report = plan_json(qwen)
    assert all(window["mixed_pairs"] is None for window in report["windows"])
    assert report["geometry"]["num_key_heads"] == 16
    kept = [window["units_kept"] for window in report["windows"]]
    assert kept == sorted(kept, reverse=True)


def test_a_larger_budget_holds_more_and_a_larger_gate_input_keeps_less(kimi: Path):
    small, large = (plan_json(kimi, "--w-max", "16", "--tp", "1", "--budget", b) for b in ("1GiB", "2GiB"))
    assert large["windows"][0]["ranks"][0]["slots"] > small["windows"][0]["ranks"][0]["slots"]
    bold = plan_json(kimi, "--w-max", "16", "--tp", "1", "--a-s", "0.5")
    assert bold["windows"][0]["units_kept"] < small["windows"][0]["units_kept"]


def test_a_written_plan_loads_and_shows_what_was_planned(kimi: Path, tmp_path: Path):
    file = tmp_path / "kimi.plan"
    args = ("plan", kimi, "--w-max", "16", "--tp", "1,2", "--placement", "storage", "-o", file)
    assert run(*args).exit_code == 0
    plan = SelectionPlan.load(file)
    assert int(plan.mask.sum()) == 29_389
    assert plan.placements[2].moved_units == 92
    shown = json.loads(run("show", file, "--json").stdout)
    assert (shown["units_kept"], shown["w_max"], shown["c_ckpt"]) == (29_389, 16, 2.6279)
    text = run("show", file)
    assert text.exit_code == 0
    assert "TP 2: storage" in text.output
    plan.check_weights(read_checkpoint(kimi).gate.fingerprint())


def test_a_plan_is_written_for_the_dtypes_of_the_server(kimi: Path, tmp_path: Path):
    file = tmp_path / "bf16.plan"
    args = (
        "plan",
        kimi,
        "--w-max",
        "16",
        "--tp",
        "1",
        "--state-dtype",
        "bfloat16",
        "--conv-dtype",
        "float32",
        "-o",
        file,
    )
    summary = json.loads(run(*args, "--json").stdout)
    assert (summary["temporal_dtype"], summary["conv_dtype"]) == ("bfloat16", "float32")
    dtypes = SelectionPlan.load(file).dtypes
    assert dtypes == DtypePolicy(torch.bfloat16, torch.float32)
    assert summary["dense_bytes"] == SelectionPlan.load(file).geometry.dense_bytes(dtypes)


def test_a_plan_is_refused_for_other_weights_and_other_models(kimi: Path, qwen: Path, tmp_path: Path):
    file = tmp_path / "kimi.plan"
    assert run("plan", kimi, "--w-max", "16", "-o", file).exit_code == 0
    assert f"made for the weights of {kimi}" in run("show", file, "--model", kimi).output
    other = tmp_path / "other"
    geometry, gate = published_kimi_linear()
    write_checkpoint(other, geometry.family, dataclasses.replace(gate, A_log=gate.A_log + 0.5), geometry)
    for model, message in ((other, "made for the weights"), (qwen, "made for another model")):
        result = dasc("show", file, "--model", model)
        assert (result.returncode, message in result.stderr) == (2, True), result.stderr


def test_a_plan_follows_links_and_replaces_nothing_but_files(kimi: Path, tmp_path: Path):
    link = tmp_path / "link.plan"
    link.symlink_to(tmp_path / "real.plan")
    assert run("plan", kimi, "--w-max", "16", "-o", link).exit_code == 0
    assert link.is_symlink()
    assert int(SelectionPlan.load(tmp_path / "real.plan").mask.sum()) == 29_389
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo"):
        result = dasc("plan", kimi, "--w-max", "16", "-o", path)
        assert result.returncode == 2
        assert f"cannot write the plan: not a regular file: '{path}'" in result.stderr
    assert (tmp_path / "fifo").is_fifo()


def test_a_failed_profile_leaves_no_file(kimi: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full_disk(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full_disk)
    result = run("profile", kimi, "-o", tmp_path / "profile")
    assert isinstance(result.exception, OSError)
    assert list(tmp_path.iterdir()) == []


def test_nothing_kept_is_still_json_and_a_table(kimi: Path):
    window = plan_json(kimi, "--w-max", "100000", "--tp", "1")["windows"][0]
    assert (window["units_kept"], window["c_temp_ragged"]) == (0, None)
    assert "29.4" in run("plan", kimi, "--w-max", "100000", "--tp", "1").output  # convolution rows are left


def test_names_are_printed_as_they_are(kimi: Path, tmp_path: Path):
    folder = tmp_path / "[red]a$b$ :smile:[/x]"
    shutil.copytree(kimi, folder)
    result = run("plan", folder, "--w-max", "16", "--tp", "1", "-o", tmp_path / "[bold]x.plan")
    assert result.exit_code == 0, result.output
    assert str(folder) in result.output
    assert f"plan written to {tmp_path / '[bold]x.plan'}" in result.output
    assert run("profile", folder, "-o", tmp_path / "profile").exit_code == 0


def test_no_figure_is_cut_on_a_narrow_terminal(kimi: Path):
    wide = run("plan", kimi, "--w-max", "16", "--tp", "1,2")
    narrow = CliRunner(env={"COLUMNS": "40"}).invoke(app, ["plan", str(kimi), "--w-max", "16", "--tp", "1,2"])
    assert "…" not in narrow.output
    assert narrow.output.splitlines()[:-1] == wide.output.splitlines()[:-1]


def test_default_degrees_that_do_not_fit_are_named(tmp_path: Path):
    geometry = dataclasses.replace(GEOMETRIES["kimi-linear"], num_value_heads=2, num_key_heads=2)
    write_checkpoint(tmp_path, geometry.family, example_gate(geometry), geometry)
    assert "left out: TP 4, 8" in run("plan", tmp_path, "--w-max", "16").output


def test_standard_error_is_silent_off_a_terminal(kimi: Path):
    assert dasc("plan", kimi, "--w-max", "16", "--tp", "1").stderr == ""


def test_profile_writes_figures_and_numbers(kimi: Path, qwen: Path, tmp_path: Path):
    for model, names in ((kimi, {"decay", "layers", "retained", "channels"}), (qwen, {"decay", "layers", "horizons"})):
        folder = tmp_path / model.name
        assert run("profile", model, "-o", folder).exit_code == 0
        assert {p.stem for p in folder.glob("*.png")} == names
        assert {p.stem for p in folder.glob("*.svg")} == names
        assert all(p.read_bytes().startswith(b"\x89PNG") for p in folder.glob("*.png"))
        numbers = json.loads((folder / "profile.json").read_text())
        assert numbers["cutoffs"][0]["w_max"] == 16
    kimi_numbers = json.loads((tmp_path / "kimi-linear" / "profile.json").read_text())
    assert kimi_numbers["cutoffs"][0]["retained"] == 29_389


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["plan", "no/such/folder"], "no/such/folder"),
        (["plan", "MODEL", "--w-max", "2"], "expected numbers from 4"),
        (["plan", "MODEL", "--w-max", "16,x"], "whole numbers"),
        (["plan", "MODEL", "--tp", "3"], "cannot be shared equally by 3 ranks"),
        (["plan", "MODEL", "--budget", "lots"], "expected a size"),
        (["plan", "MODEL", "--budget", "9" * 400], "expected a size"),
        (["plan", "MODEL", "--w-max", "9" * 30], "expected numbers from 4 to"),
        (["profile", "MODEL", "-o", "out", "--w-max", "9" * 30], "--w-max"),
        (["plan", "MODEL", "--epsilon", "2"], "epsilon"),
        (["plan", "MODEL", "--a-s", "nan"], "gate_input"),
        (["plan", "MODEL", "-o", "x.plan"], "one --w-max"),
        (["plan", "MODEL", "--w-max", "16", "-o", "no/such/folder/x.plan"], "no/such/folder"),
        (["show", "MODEL/config.json"], "config.json"),
        (["show", "missing.plan"], "missing.plan"),
        (["example", "kimi-linear", "-o", "MODEL/.."], "must be empty"),
    ],
)
def test_wrong_input_ends_with_status_2_and_one_line(kimi: Path, tmp_path: Path, args: list[str], message: str):
    result = dasc(*(a.replace("MODEL", str(kimi)) for a in args), cwd=tmp_path, env={"HF_HUB_OFFLINE": "1"})
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert len([line for line in result.stderr.splitlines() if line.startswith(("dasc:", "Error:"))]) == 1


def test_a_failed_plan_leaves_no_file(kimi: Path, tmp_path: Path):
    before = set(tmp_path.iterdir())
    args = ("plan", kimi, "--w-max", "16", "--tp", "2", "--layout", "padded", "--placement", "storage")
    result = dasc(*args, "-o", tmp_path / "x.plan")
    assert result.returncode == 2
    assert "ragged" in result.stderr
    assert set(tmp_path.iterdir()) == before


def test_a_reader_that_goes_away_is_no_error(kimi: Path):
    shell = f"{sys.executable} -m dasc plan {kimi} --json | head -c 1 > /dev/null; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr


def test_closed_standard_output_is_no_traceback(kimi: Path):
    shell = f"{sys.executable} -m dasc plan {kimi} --w-max 16 --tp 1 >&-"
    result = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert "Traceback" not in result.stderr


def test_help_comes_quickly_and_names_the_commands():
    times = []
    for _ in range(3):
        start = time.perf_counter()
        result = dasc("--help")
        times.append(time.perf_counter() - start)
    assert result.returncode == 0
    for command in ("plan", "profile", "show", "example"):
        assert command in result.stdout
    assert min(times) < 1.0, times


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("1.5 MiB", 3 << 19),
        ("500MB", 500_000_000),
        ("77", 77),
        ("2kib", 2048),
        ("1PiB", 1 << 50),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_sizes_are_read_as_written(text: str, size: int):
    assert ByteSize().convert(text, None, None) == size


@pytest.mark.parametrize(
    ("size", "text"), [(7, "7 B"), (75_497_472, "72.00 MiB"), (8 << 30, "8.00 GiB"), (1 << 41, "2.00 TiB")]
)
def test_sizes_are_written_with_their_unit(size: int, text: str):
    assert format_bytes(size) == text


def test_errors_of_the_readers_are_value_errors():
    assert issubclass(CheckpointError, ValueError)
