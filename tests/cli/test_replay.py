"""`dasc replay` as a user meets it: a table, JSON, files, and one line when something is wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result

from dasc.cli.replay import ARM_NAMES
from dasc.eval.replay_arms import ARMS
from dasc.models import zoo
from tests.cli import commands
from tests.cli.commands import failing
from tests.eval.replay_runs import save_tiny_model
from tests.eval.task_models import save_task_model
from tests.eval.test_replay_files import disk_of

SMALL = ("--count", "3", "--turns", "2", "--shrink", "512", "--memory", "300KiB", "--server-limit", "2", "--seeds", "2")
CHAT = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder)
    return folder


def run(*args: str | Path) -> Result:
    result = commands.run("replay", *args)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def test_without_a_file_made_up_chats_are_served(model: Path, tmp_path: Path):
    report = json.loads(run("--model", model, *SMALL, "--arms", "dense,wr,nr", "--json", "-o", tmp_path).stdout)
    settings = report["settings"]
    assert settings["model"] == str(model)
    assert (settings["source"], settings["conversations"], settings["requests"]) == ("made up", 3, 6)
    assert (settings["memory_bytes"], settings["server_limit"], settings["seeds"]) == (300 * 1024, 2, 2)
    assert settings["w_max"] == [16]  # the operating point of the family
    assert [arm["label"] for arm in report["arms"]] == ["dense", "wr", "nr"]
    for arm in report["arms"]:
        memory = arm["memory"]
        assert memory["native_bytes"] + memory["compressed_bytes"] + memory["tmp_bytes"] <= 300 * 1024
        assert len(arm["seeds"]) == 2
        for name, mean in arm["mean"].items():
            values = [seed[name] for seed in arm["seeds"] if seed[name] is not None]
            assert mean == (pytest.approx(sum(values) / len(values)) if values else None), name
    assert json.loads((tmp_path / "replay.json").read_text()) == report
    assert sorted(p.name for p in tmp_path.iterdir()) == ["records.json", "replay.json", "replay.png", "replay.svg"]
    assert (tmp_path / "replay.png").read_bytes().startswith(b"\x89PNG")
    assert b"</svg>" in (tmp_path / "replay.svg").read_bytes()


def test_a_file_is_served_and_the_table_says_what_came_of_it(model: Path, tmp_path: Path):
    path = tmp_path / "chats.jsonl"
    path.write_text((json.dumps(CHAT) + "\n") * 3)
    result = run(
        path, "--model", model, "--memory", "300KiB", "--server-limit", "2", "--seeds", "1", "--w-max", "16,32"
    )
    for expected in ("3 requests", "300.00 KiB", "dense", "nr 16", "wr 32", "TTFT s (P95)", "tokens", "100.0%"):
        assert expected in result.stdout
    assert "random" not in result.stdout


def test_a_bundled_model_is_asked_what_it_was_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_task_model(tmp_path / "gdn", "gdn")
    monkeypatch.setattr(zoo, "_ROOT", tmp_path)
    args = ["--model", "gdn", "--count", "5", "--turns", "2", "--memory", "400KiB", "--seeds", "1"]
    args += ["--arms", "dense,nr"]
    result = run(*args)
    assert "10 requests" in result.stdout
    assert "answers" in result.stdout
    report = json.loads(run(*args, "--json").stdout)
    settings = report["settings"]
    assert (settings["model"], settings["source"], settings["w_max"]) == ("gdn", "questions", [64])
    assert "shrink" not in settings
    assert all(0 <= arm["mean"]["right"] <= 1 for arm in report["arms"])


def test_a_bundled_model_reads_chats_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_task_model(tmp_path / "kda")
    monkeypatch.setattr(zoo, "_ROOT", tmp_path)
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(CHAT) + "\n")
    report = json.loads(run(path, "--memory", "400KiB", "--seeds", "1", "--arms", "off", "--json").stdout)
    assert report["settings"]["source"] == str(path)
    assert report["arms"][0]["mean"]["right"] is None


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--turns", "9"], "turns must be 1 to 8 where questions are asked, got 9"),
        (["--max-context", "100"], "take up to 256 tokens and answers 3, the limits are 100 and 1024"),
        (["--max-new-tokens", "2"], "take up to 256 tokens and answers 3, the limits are 16384 and 2"),
    ],
)
def test_questions_are_not_cut(args: list[str], message: str, tmp_path: Path, capsys, monkeypatch):
    save_task_model(tmp_path / "kda")
    monkeypatch.setattr(zoo, "_ROOT", tmp_path)
    assert message in failing(capsys, monkeypatch, "replay", "--count", "2", *args)


def test_every_arm_can_be_asked_for_by_name(model: Path):
    assert ARM_NAMES.split(",") == list(ARMS)
    path = ("--model", model, *SMALL[:-1], "1")
    report = json.loads(run(*path, "--arms", ARM_NAMES, "--window-kv", "cached", "--temperature", "1", "--json").stdout)
    assert [arm["arm"] for arm in report["arms"]] == list(ARMS)
    assert report["settings"]["window_kv"] == "cached"
    assert next(arm for arm in report["arms"] if arm["arm"] == "off")["mean"]["same_output"] == 1.0


HOSTILE = {
    "broken.jsonl": (b'{"messages": [', "broken.jsonl:1: expected a JSON object"),
    "empty-chat.jsonl": (b'{"messages": []}', "empty-chat.jsonl:1: expected at least one entry"),
    "no-role.jsonl": (b'{"messages": [{"content": "hi"}]}', r"no-role.jsonl:1: messages[0].role must be"),
    "ids.jsonl": (b'{"messages": [{"role": "user", "content": [777]}]}', "ids.jsonl:1: token ids must be in [0, 260)"),
    "empty.jsonl": (b"", "empty.jsonl: expected conversations"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_end_in_one_line_that_names_them(name: str, model: Path, tmp_path: Path, capsys, monkeypatch):
    data, message = HOSTILE[name]
    (tmp_path / name).write_bytes(data)
    assert message in failing(capsys, monkeypatch, "replay", tmp_path / name, "--model", model, "--memory", "300KiB")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["no-such.jsonl"], "no-such.jsonl"),
        (
            ["--memory", "3KiB"],
            "arm dense: a budget of 3072 bytes is too small: one usable slot and what is temporary take ",
        ),
        (["--memory", "99999TiB", "--arms", "dense"], "arm dense: no memory for its pools and "),
        (["--threads", "1000000"], "--threads"),
        (["--temperature", "nan"], "temperature must be finite"),
        (["--max-context", "8"], "tokens, the limit is 8"),
        (["--kv-tokens", "5"], "tokens of KV, but there are 5"),
        (["--arms", "dense,warm"], "expected names out of dense,nr"),
        (["--w-max", "2"], "--w-max"),
        (["--seeds", "0"], "--seeds"),
        (["--shrink", "0"], "--shrink"),
        (["--temperature", "-1"], "--temperature"),
        (["-o", "MODEL/config.json"], "config.json"),
        (["--model", "MODEL/none"], "none"),
    ],
)
def test_wrong_input_ends_in_one_line(args: list[str], message: str, model: Path, capsys, monkeypatch):
    args = [arg.replace("MODEL", str(model)) for arg in args]
    assert message in failing(capsys, monkeypatch, "replay", "--model", model, *SMALL, *args)


def test_a_model_with_too_few_ids_for_bytes_is_refused(tmp_path: Path, capsys, monkeypatch):
    save_tiny_model(tmp_path, vocab_size=97)
    assert "has 260 ids, but the model has 97" in failing(capsys, monkeypatch, "replay", "--model", tmp_path, *SMALL)


def test_a_full_disk_ends_in_one_line_and_leaves_no_file(model: Path, tmp_path: Path, capsys, monkeypatch):
    with disk_of(20_000):
        error = failing(
            capsys, monkeypatch, "replay", "--model", model, *SMALL, "--arms", "off", "-o", tmp_path / "out"
        )
    assert "File too large" in error
    assert list((tmp_path / "out").iterdir()) == []


def test_the_command_works_as_a_process(model: Path):
    command = [sys.executable, "-m", "dasc", "replay", "--model", model, *SMALL[:-1], "1", "--arms", "dense", "--json"]
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["settings"]["requests"] == 6
