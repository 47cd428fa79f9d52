"""The page of results and the commands that make it."""

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks.results import experiments, measure
from benchmarks.results_page import page
from dasc.models.zoo import MODELS, SPECIALISTS

PAGE = Path(__file__).parents[1] / "docs" / "results.md"


def test_the_page_has_every_command_and_every_result():
    text = PAGE.read_text()
    for experiment in experiments():
        assert f"    {experiment.command}\n" in text
    assert "Not measured" not in text
    for figure in (line.split("](")[1].rstrip(")") for line in text.splitlines() if line.startswith("![")):
        assert (PAGE.parent / figure).is_file(), figure


def test_what_is_not_measured_is_said(tmp_path: Path):
    commands = {(e.name, e.model): e.command for e in experiments()}
    text = page(tmp_path, commands)
    assert text.count("Not measured.") == len(commands)
    for model in (*MODELS, *SPECIALISTS):
        assert f"**{model}**" in text


def test_a_finished_command_is_run_again_only_for_another_model_and_from_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    experiment = experiments()[0]
    folder = tmp_path / experiment.key
    runs: list[list[str]] = []

    def run(arguments: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        folder.mkdir(exist_ok=True)
        assert list(folder.iterdir()) == []
        (folder / "measured.json").write_text("{}")
        runs.append(arguments)
        return subprocess.CompletedProcess(arguments, 0)

    monkeypatch.setattr(subprocess, "run", run)
    measure(experiment, tmp_path)
    measure(experiment, tmp_path)
    assert len(runs) == 1
    finished = folder / "finished.json"
    finished.write_text(json.dumps(json.loads(finished.read_text()) | {"model_sha256": "of another"}))
    measure(experiment, tmp_path)
    assert len(runs) == 2
    assert (folder / "measured.json").exists()
