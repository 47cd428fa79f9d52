"""`dasc eval quality` and `dasc eval compare` as a user meets them."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import Result

from dasc.cli.evaluate.quality import DEFAULT_METHODS, METHOD_NAMES
from dasc.eval.quality import server_backend
from dasc.eval.quality.arms import METHODS
from dasc.models.tasks import VOCABULARY
from dasc.plan import SelectionPlan
from dasc.reference import random_mask
from tests.cli import commands
from tests.cli.commands import failing
from tests.eval.quality.fake_server import FakeServer, fake_server
from tests.eval.replay_runs import save_tiny_model

SMALL = ("--tasks", "parity,latest_value", "--length", "40", "--count", "4", "--w-max", "16", "--block", "3")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny_model(folder, vocab_size=VOCABULARY)
    return folder


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setattr(server_backend, "_METRICS_PAUSE_S", 0.01)
    with fake_server() as server:
        yield server


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    lines = [{"prompt": f"question {i} of some words", "answer": "yes 0", "task": f"set {i % 2}"} for i in range(6)]
    path.write_text("".join(json.dumps({**line, "kind": "exact", "max_new_tokens": 4}) + "\n" for line in lines))
    return path


def run(*args: str | Path, status: int = 0, command: str = "quality") -> Result:
    result = commands.run("eval", command, *args)
    assert result.exit_code == status, (result.output, result.exception)
    return result


def test_methods_by_name_are_those_that_there_are():
    assert METHOD_NAMES.split(",") == list(METHODS)
    assert set(DEFAULT_METHODS.split(",")) <= set(METHODS)


def test_a_run_leaves_every_figure_and_setting_and_goes_on_from_there(model: Path, tmp_path: Path):
    observed = ("--magnitudes", tmp_path / "seen" / "magnitudes.json")
    assert commands.run("observe", model, "--targets", "40", "-o", tmp_path / "seen").exit_code == 0
    args = ("--model", model, *SMALL, "--arms", METHOD_NAMES, *observed, "-o", tmp_path / "out", "--json")
    tmp_path /= "out"
    report = json.loads(run(*args).stdout)
    assert report == json.loads((tmp_path / "quality.json").read_text())
    assert report["model"] == "tiny"
    assert (report["shared"]["items"], report["shared"]["slots"], report["shared"]["block_items"]) == (8, 512, 3)
    assert report["run"]["ops"] == "fast"
    assert len(report["shared"]["model_sha256"]) == len(report["shared"]["items_sha256"]) == 64
    assert [arm["label"] for arm in report["arms"]] == [
        "dense",
        "nr 16",
        "wr 16",
        *(f"random 16 {seed}" for seed in (1234, 2027, 3407, 4519, 5683)),
        "padded 16",
        "int8 16",
        "int4 16",
        "observed 16",
        "int8-all",
        "int4-all",
    ]
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["accuracy.png", "accuracy.svg", "quality.json", "ttft.png", "ttft.svg", "units.jsonl"]
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    rows = report["table"]["rows"]
    assert [(row["task"], row["items"]) for row in rows] == [("parity/40", 4), ("latest_value/40", 4), ("all items", 8)]
    for row in rows:
        cells = {cell["method"]: cell for cell in row["cells"]}
        assert cells["padded"]["score"] == cells["nr"]["score"]
        assert cells["random"]["sd"] is not None
        assert all(0.9 < cell["hit"] < 1 for cell in row["cells"])
    first = (tmp_path / "quality.json").read_bytes()
    run(*args)  # nothing is left to do
    assert (tmp_path / "quality.json").read_bytes() == first


def test_observed_units_and_magnitudes_go_together(model: Path, tmp_path: Path, capsys, monkeypatch):
    (tmp_path / "magnitudes.json").write_text("{}")
    for options in (("--arms", "observed"), ("--arms", "nr", "--magnitudes", tmp_path / "magnitudes.json")):
        error = failing(capsys, monkeypatch, "eval", "quality", "--model", model, *SMALL, *options)
        assert "magnitudes must be given for the method 'observed', and for no other" in error


def test_a_changed_setting_ends_in_one_line(model: Path, tmp_path: Path, capsys, monkeypatch):
    args = ("--model", model, *SMALL, "--arms", "dense", "-o", tmp_path)
    run(*args)
    error = failing(capsys, monkeypatch, "eval", "quality", *args, "--seed", "1")
    assert "units.jsonl cannot be resumed: seed was 0 and is now 1; take another output folder" in error


def test_the_table_shows_scores_hits_and_differences(model: Path):
    output = run("--model", model, *SMALL, "--arms", "dense,nr,random").stdout
    for expected in ("tiny: mean score", "parity/40", "nr 16", "random 16", "±", "nr 16 - dense", "95 % interval"):
        assert expected in output


def test_questions_that_are_warmed_exactly_hit_too(model: Path, questions: Path):
    """Text, read as bytes."""
    report = json.loads(run(questions, "--model", model, "--arms", "nr", "--w-max", "16", "--json").stdout)
    length = len("question 0 of some words")
    for task in report["arms"][0]["tasks"].values():
        assert (task["cached_tokens"], task["new_tokens"], task["loaded"]) == (3 * (length - 1), 3, 3)


def test_controls_that_are_not_fulfilled_end_in_status_1_and_are_written(model: Path, tmp_path: Path):
    args = ("--model", model, *SMALL, "--arms", "dense,nr", "--controlled", "--concurrency", "4")
    assert "failed:" not in run(*args).stderr
    result = run(*args, "--slots", "20", "-o", tmp_path, status=1)
    line = "failed: tiny, nr 16: parity/40/0: 17 slots available after warming, fewer than 20"
    assert line in result.stderr
    assert "not fit to be reported: dense, nr 16" in result.stdout
    report = json.loads((tmp_path / "quality.json").read_text())
    assert line.removeprefix("failed: ") in report["table"]["failures"]


def test_a_server_is_measured_arm_by_arm_and_arms_are_compared(fake: FakeServer, questions: Path, tmp_path: Path):
    for label in ("dense", "nr 16", "random 16 1234"):
        run(questions, "--url", fake.url, "--arm", label, "-o", tmp_path / label)
    assert sorted(path.name for path in (tmp_path / "dense").iterdir()) == ["quality.json", "units.jsonl"]
    folders = [tmp_path / label for label in ("dense", "nr 16", "random 16 1234")]
    report = json.loads(run(*folders, "-o", tmp_path / "all", "--json", command="compare").stdout)
    assert [arm["label"] for arm in report["arms"]] == ["dense", "nr 16", "random 16 1234"]
    assert report["model"] == "the-model"
    assert report["shared"]["slots"] is None
    assert [cell["score"] for cell in report["table"]["rows"][-1]["cells"]] == [1.0, 1.0, 1.0]
    assert report == json.loads((tmp_path / "all" / "quality.json").read_text())
    assert "nr 16 - dense" in run(tmp_path / "all", command="compare").stdout


def test_a_server_can_be_given_a_random_mask_of_the_same_counts(model: Path, tmp_path: Path):
    """What an arm ``random 16 1234`` serves."""
    files = {name: tmp_path / f"{name}.plan" for name in ("nr", "1234", "2027")}
    for name, file in files.items():
        seed = [] if name == "nr" else ["--random-mask", name]
        result = commands.run("plan", model, "--w-max", "16", "--tp", "1,2", *seed, "-o", file)
        assert result.exit_code == 0, result.output
    plans = {name: SelectionPlan.load(file) for name, file in files.items()}
    masks = {name: plan.mask for name, plan in plans.items()}
    assert torch.equal(masks["1234"], random_mask(masks["nr"], 1234))
    assert not torch.equal(masks["1234"], masks["2027"])
    assert plans["1234"].layouts(1)[0].counts == plans["nr"].layouts(1)[0].counts
    assert not plans["1234"].windows[masks["1234"]].any()
    without_file = commands.run("plan", model, "--random-mask", "1")
    assert "--random-mask is of the plan that -o writes" in without_file.output


def test_chat_goes_to_the_chat_route(fake: FakeServer, questions: Path):
    run(questions, "--url", fake.url, "--arm", "dense", "--api", "chat", "--served-model", "other")
    assert {body["model"] for body in fake.bodies} == {"other"}
    assert all("messages" in body for body in fake.bodies)


def test_an_uncontrollable_server_is_not_passed(fake: FakeServer, questions: Path):
    result = run(questions, "--url", fake.url, "--arm", "dense", "--controlled", status=1)
    assert "the backend does not tell evictions" in result.stderr


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--arms", "dense,warm"], "arms must be of dense, nr"),
        (["--arms", ""], "arms must be of dense, nr"),
        (["--w-max", "2"], "--w-max"),
        (["--model", "no-such-folder"], "no-such-folder"),
        (["--arm", "dense"], "--arm is for runs with --url"),
        (["--url", "http://127.0.0.1:1", "--arms", "dense"], "--arms is for runs without --url"),
        (["--url", "http://127.0.0.1:1"], "--url needs --arm"),
        (["--url", "127.0.0.1:1", "--arm", "dense"], "url must begin with http"),
        (["--url", "http://127.0.0.1:1", "--arm", "nr"], "takes a W_max, such as 'nr 16'"),
        (["--temperature", "nan"], "temperature"),
        (["--tasks", "none"], "none"),
        (["--length", "8"], "length must be >= 32"),
    ],
)
def test_wrong_input_ends_in_one_line(args: list[str], message: str, model: Path, capsys, monkeypatch):
    given = [] if "--url" in args or "--model" in args else ["--model", model]
    small = SMALL[:6] if "--url" in args else SMALL
    assert message in failing(capsys, monkeypatch, "eval", "quality", *given, *small, *args)


def test_results_that_cannot_be_compared_end_in_one_line(
    fake: FakeServer, questions: Path, tmp_path: Path, capsys, monkeypatch
):
    run(questions, "--url", fake.url, "--arm", "dense", "-o", tmp_path / "a")
    run(questions, "--url", fake.url, "--arm", "nr 16", "--replays", "2", "-o", tmp_path / "b")
    error = failing(capsys, monkeypatch, "eval", "compare", tmp_path / "a", tmp_path / "b")
    assert "results of the-model cannot be compared: replays is None in one and 2 in another" in error
    assert "questions.jsonl: not a result" in failing(capsys, monkeypatch, "eval", "compare", questions)
