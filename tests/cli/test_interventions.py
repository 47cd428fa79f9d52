"""``dasc eval interventions`` as a user meets it."""

import json
from pathlib import Path

import pytest

from dasc.models.tasks import TASKS
from tests.cli.commands import run
from tests.eval.task_models import save_task_model

OPTIONS = ("--tasks", "recall_multi,parity", "--length", "40", "--count", "3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_task_model(tmp_path_factory.mktemp("models") / "small-kda")


def test_the_table_has_a_row_for_each_task_and_a_column_for_each_arm(folder: Path, tmp_path: Path):
    result = run("eval", "interventions", folder, *OPTIONS, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    for word in ("small-kda", "recall_multi", "parity", "baseline", "zero-full-kv", "zero-linear", "zero-both"):
        assert word in result.output
    report = json.loads((tmp_path / "out" / "interventions.json").read_text())
    cell = report["tasks"]["parity"]["zero-both"]
    assert f"{cell['share']:.3f} [{cell['low']:.2f}, {cell['high']:.2f}]" in result.output
    assert (tmp_path / "out" / "interventions.jsonl").exists()
    again = run("eval", "interventions", folder, *OPTIONS, "--json")
    assert json.loads(again.stdout) == report


@pytest.mark.parametrize(
    ("options", "message"),
    [(("--tasks", "chess"), "got 'chess'"), ((*OPTIONS, "--arms", "all"), "got 'all'")],
)
def test_wrong_names_are_refused_by_name(folder: Path, options: tuple[str, ...], message: str):
    """Such errors end in one line and status 2 (tests/cli/test_commands.py)."""
    result = run("eval", "interventions", folder, *options)
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)


def test_all_tasks_that_fit_are_asked_by_default(folder: Path):
    result = run("eval", "interventions", folder, "--length", "32", "--count", "1", "--json")
    assert list(json.loads(result.stdout)["tasks"]) == [task for task in TASKS if task != "text"]
