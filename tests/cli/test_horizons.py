"""``dasc eval horizons`` as a user meets it."""

import json
from pathlib import Path

import pytest

from tests.cli.commands import run
from tests.eval.task_models import save_task_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_task_model(tmp_path_factory.mktemp("models") / "small-kda")


def test_table_numbers_and_figure_of_the_tasks_prefixes(folder: Path, tmp_path: Path):
    result = run("eval", "horizons", folder, "--targets", "64,32", "--per-target", "3", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out" / "horizons.json").read_text())
    assert report["settings"]["source"] == {"prefixes": "tasks", "seed": 0, "targets": [64, 32], "per_target": 3}
    for name in ("fixed", "calibrated"):
        for pair in ("empirical", "magnitude"):
            pooled = report[name][pair]["pooled"]
            assert f"{pooled['median']:.3f} [{pooled['q1']:.3f}, {pooled['q3']:.3f}]" in result.output
    assert (tmp_path / "out" / "horizons.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "out" / "horizons.svg").read_bytes()


def test_prefixes_of_a_file_of_conversations_keep_their_index(folder: Path, tmp_path: Path):
    path = tmp_path / "sharegpt.json"
    said = ["too short", "a" * 120, "b" * 130, "c" * 400, "d" * 410]
    path.write_text(json.dumps([{"conversations": [{"from": "human", "value": text}]} for text in said]))
    result = run(
        "eval", "horizons", folder, "--conversations", path, "--targets", "32,100", "--per-target", "2", "--json"
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert [(p["source"], p["target"], p["tokens"]) for p in report["prefixes"]] == [
        (3, 100, 100),
        (4, 100, 100),
        (1, 32, 32),
        (2, 32, 32),
    ]
    assert report["settings"]["source"]["prefixes"] == "sharegpt.json"


def test_a_file_without_long_conversations_is_refused(folder: Path, tmp_path: Path):
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([{"conversations": [{"from": "human", "value": "short"}]}]))
    result = run("eval", "horizons", folder, "--conversations", path)
    assert isinstance(result.exception, ValueError)
    assert "no conversation has the 112 characters that 32 tokens need" in str(result.exception)
