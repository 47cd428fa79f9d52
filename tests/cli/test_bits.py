"""`dasc eval bits` as a user meets it: tables, JSON, files, and one line when something is wrong."""

import json
from pathlib import Path

import pytest

import dasc.eval.bits
from dasc.eval.bits import BitsSettings
from dasc.models.tasks import TASKS, VOCABULARY
from tests.cli import commands
from tests.cli.commands import failing
from tests.eval.replay_runs import save_tiny_model

COPYING = ("--tasks", "copying")
SMALL = ("--length", "40", "--count", "2", "--calibration", "1", "--questions", "1", "--budgets", "1/8", "--seeds", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, vocab_size=VOCABULARY)
    return folder


def run(*args: str | Path) -> str:
    result = commands.run("eval", "bits", *args)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def test_files_and_json_hold_every_figure_and_setting(model: Path, tmp_path: Path):
    report = json.loads(run(model, *COPYING, *SMALL, "--json", "-o", tmp_path))
    assert json.loads((tmp_path / "bits.json").read_text()) == report
    settings = {
        name: report["settings"][name] for name in ("tasks", "length", "count", "questions", "budgets", "seeds")
    }
    assert settings == {
        "tasks": ["copying"],
        "length": 40,
        "count": 2,
        "questions": 1,
        "budgets": ["1/8"],
        "seeds": 1,
    }
    # the budget asked for, and those of all units with four and with eight bits
    assert [p["budget_bytes"] for p in report["points"] if p["arm"] == "keep-fp32"] == [512, 768, 1280]
    assert {d["task"] for d in report["differences"]} == {"copying", "all"}
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["bits-units.jsonl", "bits.json", "bits.png", "bits.svg"]
    assert (tmp_path / "bits.png").read_bytes().startswith(b"\x89PNG")


def test_tables_show_arms_at_equal_bytes_and_their_differences(model: Path):
    text = run(model, *COPYING, *SMALL)
    for expected in (
        "bits-range",
        "keep-int8",
        "uniform-4",
        "random-int8",
        "12.50%",
        "18.75%",
        "95 % interval",
        "dense",
    ):
        assert expected in text


def test_without_tasks_those_are_asked_that_the_length_can_hold(monkeypatch: pytest.MonkeyPatch):
    seen = []

    def stop(folder: Path, settings: BitsSettings, **options):
        seen.append((folder, settings))
        raise ValueError("seen")

    monkeypatch.setattr(dasc.eval.bits, "measure_bits", stop)
    commands.run("eval", "bits", "some-folder", "--length", "40", "--use-tokens", "5")
    [(folder, settings)] = seen
    assert folder == Path("some-folder")
    assert settings.use_tokens == 5
    assert set(settings.tasks) == set(TASKS) - {"text"}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["some-folder", "--budgets", "2"], "expected fractions over 0 and at most 1"),
        (["some-folder", "--budgets", "1/0"], "expected fractions over 0 and at most 1"),
        (["some-folder", "--tasks", "nonsense"], "tasks must be of"),
        (["some-folder", "--length", "8"], "got none"),
        (["/nowhere"], "/nowhere"),
    ],
)
def test_wrong_input_is_one_line(
    args: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    assert message in failing(capsys, monkeypatch, "eval", "bits", *args, "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()
