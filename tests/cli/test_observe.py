"""``dasc observe``, and ``dasc plan`` by what it wrote."""

import json
from pathlib import Path

import pytest
import torch

from dasc.magnitudes import UnitMagnitudes
from dasc.plan import SelectionPlan
from dasc.reference import select_largest
from tests.cli.commands import failing, run
from tests.eval.task_models import save_task_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_task_model(tmp_path_factory.mktemp("models") / "small-kda")


@pytest.fixture(scope="module")
def observed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("observed")
    result = run("observe", folder, "--targets", "64,32", "--per-target", "3", "-o", out)
    assert result.exit_code == 0, result.output
    assert "Magnitudes of units over 6 prefixes" in result.output
    assert sorted(path.name for path in out.iterdir()) == ["magnitudes.json", "magnitudes.jsonl"]
    return out / "magnitudes.json"


def test_a_second_run_and_json_give_the_same(folder: Path, observed: Path):
    result = run("observe", folder, "--targets", "64,32", "--per-target", "3", "-o", observed.parent, "--json")
    assert json.loads(result.stdout) == json.loads(observed.read_text())


def test_prefixes_are_of_the_tasks_asked_for(folder: Path):
    args = ("observe", folder, "--targets", "32", "--per-target", "3", "--json")
    source = json.loads(run(*args, "--tasks", "parity,copying").stdout)["source"]
    assert [prefix["source"] for prefix in source["prefixes"]] == ["parity", "copying", "parity"]
    assert source["source"]["tasks"] == ["parity", "copying"]
    for wrong, message in (("parity,chess", "got 'chess'"), ("text", "targets must be at least 184 tokens, got 32")):
        assert message in str(run(*args, "--tasks", wrong).exception)


def test_a_plan_by_what_was_observed(folder: Path, observed: Path, tmp_path: Path):
    args = ("plan", folder, "--w-max", "16", "--tp", "1", "--json")
    plain = json.loads(run(*args).stdout)
    path = tmp_path / "plan.safetensors"
    result = run(*args, "--magnitudes", observed, "-o", path)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["magnitudes_sha256"] == UnitMagnitudes.load(observed).sha256()
    assert plain["magnitudes_sha256"] is None
    table = run(*args[:-1], "--magnitudes", observed).stdout
    assert "As many units as by W_max, the largest observed (ragged)" in table
    kept = told["windows"][0]["units_kept"]
    assert kept == plain["windows"][0]["units_kept"]
    plan = SelectionPlan.load(path)
    assert torch.equal(plan.mask, select_largest(UnitMagnitudes.load(observed).values, kept))


def test_tune_tries_observed_units_too(folder: Path, observed: Path):
    args = ("tune", folder, "--tasks", "parity", "--count", "2", "--length", "48", "--w-max", "16", "--json")
    result = run(*args, "--quality-budget", "1", "--magnitudes", observed)
    assert result.exit_code == 0, (result.output, result.exception)
    labels = [point["label"] for point in json.loads(result.stdout)["points"]]
    assert {"NR 16", "observed 16", "observed 16 INT8", "observed 16 INT4"} <= set(labels)


def test_wrong_files_and_options_end_in_one_line(folder: Path, observed: Path, tmp_path: Path, capsys, monkeypatch):
    other = save_task_model(tmp_path / "other", "kda", "safe")
    error = failing(capsys, monkeypatch, "plan", other, "--magnitudes", observed)
    assert "magnitudes were observed of the weights sha256:" in error
    error = failing(capsys, monkeypatch, "plan", folder, "--magnitudes", folder / "config.json")
    assert "config.json holds no magnitudes, as dasc observe writes them" in error
    error = failing(capsys, monkeypatch, "plan", folder, "--magnitudes", tmp_path / "none.json")
    assert "none.json" in error
    result = run("plan", folder, "--magnitudes", observed, "--random-mask", "1", "--w-max", "16", "-o", tmp_path / "p")
    assert result.exit_code == 2
    assert "give either --random-mask or --magnitudes, not both" in result.output
