"""``dasc eval items`` as a user meets it."""

import json
from pathlib import Path

import pytest
from click.testing import Result

from dasc.eval.items import read_items
from tests.cli import commands
from tests.cli.commands import failing


def run(*args: str | Path) -> Result:
    return commands.run("eval", "items", *args)


def test_exported_items_are_listed_like_the_ones_made(tmp_path: Path):
    path = tmp_path / "folder" / "ruler.jsonl"
    made = run("ruler", "--length", "8192", "--count", "2", "-o", path, "--json")
    assert made.exit_code == 0, made.output
    listed = json.loads(run(path, "--json").stdout)
    assert listed["tasks"] == json.loads(made.stdout)["tasks"]
    assert listed["items"] == len(read_items(path)) == 26
    first = listed["tasks"][0]
    assert (first["task"], first["items"], first["replays"], first["max_new_tokens"]) == (
        "ruler/8192/niah_single_1",
        2,
        3,
        128,
    )
    assert first["longest_prompt"] <= 8192 - 128


def test_the_table_names_tasks_counts_and_scorers(tmp_path: Path):
    result = run("ruler", "--tasks", "niah_single_1, vt", "--length", "3000", "--count", "2", "-o", tmp_path / "i")
    assert result.exit_code == 0, result.output
    for expected in ("ruler/3000/niah_single_1", "ruler/3000/vt", "string_match_all", "characters", "4 items written"):
        assert expected in result.output
    assert "tokens" in run("tasks", "--tasks", "parity", "--length", "64", "--count", "1").output


def test_depths_are_percents():
    result = run("ruler", "--tasks", "niah_single_2", "--length", "3000", "--count", "1", "--depths", "0,75", "--json")
    assert [row["task"].split("/")[-1] for row in json.loads(result.stdout)["tasks"]] == ["depth-0", "depth-75"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("ruler", "--length", "300"), "length 300 is too short for niah_single_1"),
        (("ruler", "--tasks", "x"), "subtasks must be of niah_single_1"),
        (("tasks", "--depths", "50"), "depths must not be given for items of tasks"),
        (("nowhere.jsonl",), "nowhere.jsonl"),
    ],
)
def test_wrong_input_is_one_line_and_status_2(args: tuple[str, ...], message: str, monkeypatch, capsys):
    error = failing(capsys, monkeypatch, "eval", "items", *args)
    assert message in error
    assert error.count("\n") == 1
