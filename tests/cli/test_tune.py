"""`dasc tune` and `dasc eval decay` as a user meets them."""

import json
from pathlib import Path

import pytest

from tests.cli.commands import run
from tests.eval.replay_runs import save_tiny_model

SMALL = ("--tasks", "parity,recall_single", "--count", "2", "--length", "48")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, vocab_size=448)
    return str(folder)


def test_tune_chooses_explains_and_keeps_what_it_measured(model: str, tmp_path: Path):
    """A second run with another budget measures nothing again, and fails when nothing fits."""
    arguments = ("tune", model, *SMALL, "--w-max", "4,16", "--memory", "100KiB", "-o", tmp_path)
    result = run(*arguments, "--quality-budget", "1")
    assert result.exit_code == 0, (result.output, result.exception)
    for expected in ("NR 16 INT4", "chosen", "fit in 100.00 KiB, where", "the budget is 100.00 points"):
        assert expected in " ".join(result.stdout.split())
    summary = json.loads((tmp_path / "tune.json").read_text())
    assert summary["chosen"] == "NR 16 INT4"
    assert (summary["budget"], summary["memory_bytes"], summary["measure"]) == (1, 100 * 1024, "accuracy")
    assert summary["settings"]["w_max"] == [4, 16]
    assert len(summary["settings"]["model_sha256"]) == 64
    assert summary["points"][0]["label"] == "NR 4"
    assert (tmp_path / "tune.png").read_bytes()[:4] == b"\x89PNG"
    measured = (tmp_path / "tune.jsonl").read_bytes()
    result = run(*arguments, "--quality-budget", "0", "--json")
    assert result.exit_code == 1
    assert "dasc: No way of storing checkpoints is known to stay within" in result.stderr
    assert json.loads(result.stdout)["chosen"] is None
    assert (tmp_path / "tune.jsonl").read_bytes() == measured


def test_decay_measures_states_predictions_and_policies(model: str, tmp_path: Path):
    arguments = ("--ticks", "0,1,8", "--suffixes", "0,8", "--w-max", "16", "-o", tmp_path)
    result = run("eval", "decay", model, *SMALL, *arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    for expected in ("relative error by tokens since the hit", "nr: bound, layer 0", "below 8", "rest", "by weights"):
        assert expected in " ".join(result.stdout.split())
    report = json.loads((tmp_path / "decay.json").read_text())
    assert report["settings"]["ticks"] == [0, 1, 8]
    assert list(report["traces"]) == ["all", "parity", "recall_single"]
    for trace in report["traces"].values():
        for arm in trace["arms"].values():
            assert arm["error_over_bound"][0] <= 1 + 1e-6
    policies = {policy["name"]: policy for policy in report["policies"]}
    assert list(policies) == ["nr", "below 8", "wr", "rest"]
    assert policies["nr"]["replayed_tokens"] == 0 < policies["below 8"]["replayed_tokens"] == 8
    assert policies["wr"]["replayed_tokens"] == 16
    # after no new tokens but the question all but nr do the same, after eight nr and the threshold
    assert policies["below 8"]["by_suffix"][0] == policies["wr"]["by_suffix"][0] == policies["rest"]["by_suffix"][0]
    assert policies["below 8"]["by_suffix"][1] == policies["nr"]["by_suffix"][1]
    assert (tmp_path / "decay.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("tune", "--tasks", "poetry"), "tasks must be of"),
        (("eval", "decay", "--w-max", "4", "--ticks", "1,2", "--suffixes", "0", *SMALL), "ticks must ascend from 0"),
        (("eval", "decay", *SMALL), "ticks must be below 4"),
        (("eval", "decay", "--ticks", "0,1", "--suffixes", "60", *SMALL), "suffixes must be below 4"),
    ],
)
def test_wrong_input_raises_what_the_command_prints_in_one_line(args: tuple[str, ...], message: str, model: str):
    result = run(*args, model)
    assert isinstance(result.exception, ValueError)
    assert message in str(result.exception)


def test_a_window_that_reaches_back_to_the_first_token_leaves_no_error_to_show(model: str):
    arguments = ("--ticks", "0,4", "--suffixes", "0", "--w-max", "48")
    result = run("eval", "decay", model, *SMALL, *arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "wr: all layers 0.0e+00 0.0e+00" in " ".join(result.stdout.replace("│", " ").split())
