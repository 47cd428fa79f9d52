"""The comparison as a whole, on a tiny model of random weights."""

import dataclasses
import json
from functools import cache
from pathlib import Path

import pytest
import torch

from dasc.eval import task_runs
from dasc.eval.bits import ARMS, BitsReport, BitsSettings, measure, measure_bits, quantised
from dasc.eval.bits.results import ALL_TASKS
from dasc.eval.states import Prefixes, ask
from dasc.eval.task_runs import load_task_model
from dasc.models.tasks import VOCABULARY
from dasc.models.train.evaluate import examples
from tests.eval.replay_runs import save_tiny_model

SETTINGS = BitsSettings(
    tasks=("recall_multi", "copying"), length=40, count=3, calibration=2, questions=2, budgets=("1/16", "1"), seeds=2
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(path, vocab_size=VOCABULARY)
    return path


@cache
def measured(folder: Path) -> BitsReport:
    return measure_bits(folder, SETTINGS)


def test_the_whole_budget_is_the_dense_state(folder: Path):
    report = measured(folder)
    for arm in ("keep-fp32", "bits-horizon", "bits-range", "bits-share"):
        assert report.point(arm, report.dense_bytes).scores == report.dense
    assert report.point("keep-int8", report.dense_bytes).units_of_bits["8"] == 64


def test_scores_are_those_of_the_harness(folder: Path):
    report, model = measured(folder), load_task_model(folder)
    whole = next(p for p in report.points if p.arm == "uniform-4")
    assert whole.stored_bytes == whole.budget_bytes
    for task in SETTINGS.tasks:
        drawn = examples(task, 40, 3)
        held = Prefixes.of(model, [e.context for e in drawn])
        loaded = quantised(held, torch.full((2, 32), 4))
        for score, prefixes in ((report.dense[task], held), (whole.scores[task], loaded)):
            answers = [
                ask(prefixes, [e.questions[:2] if i == j else () for j, e in enumerate(drawn)]) for i in range(3)
            ]
            assert score.accuracy == pytest.approx(sum(a.right.double().mean().item() for a in answers) / 3)
            assert score.log_prob == pytest.approx(sum(a.log_prob.mean().item() for a in answers) / 3)
            errors = [(prefixes.temporal - held.temporal)[:, i].norm() / held.temporal[:, i].norm() for i in range(3)]
            assert score.state_error == pytest.approx(sum(map(float, errors)) / 3)
    assert whole.scores[ALL_TASKS].state_error > 0


def test_all_arms_are_there_and_settings_say_what_was_done(folder: Path):
    report = measured(folder)
    assert {point.arm for point in report.points} == set(ARMS)
    assert [p.budget_bytes for p in report.points] == sorted(p.budget_bytes for p in report.points)
    assert report.settings["model_sha256"]
    assert report.settings["budgets"] == ("1/16", "1")
    json.dumps(report.as_dict(), allow_nan=False)


def test_more_bytes_are_modelled_to_lose_less(folder: Path):
    losses = [p.modelled_loss for p in measured(folder).points if p.arm == "bits-range"]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] == 0
    least = {p.budget_bytes: p.modelled_loss for p in measured(folder).points if p.arm == "bits-range"}
    assert all(p.modelled_loss >= 0.999 * least[p.budget_bytes] for p in measured(folder).points)


def test_magnitudes_come_from_other_examples_than_scores(folder: Path, monkeypatch: pytest.MonkeyPatch):
    drawn: list[list[tuple[int, ...]]] = []

    def recorded(*args):
        drawn.append([example.context for example in examples(*args)])
        return examples(*args)

    monkeypatch.setattr(task_runs, "examples", recorded)
    measure_bits(folder, dataclasses.replace(SETTINGS, tasks=("copying",), budgets=("1",), seeds=1))
    [calibration, asked] = drawn
    assert (len(calibration), len(asked)) == (SETTINGS.calibration, SETTINGS.count)
    assert not set(calibration) & set(asked)


def test_an_interrupted_run_goes_on_and_says_the_same(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, scored = tmp_path / "units.jsonl", []

    def stop(done: int, total: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_bits(folder, SETTINGS, units_path=path, progress=stop)
    score = measure._score
    monkeypatch.setattr(measure, "_score", lambda *args: scored.append(1) or score(*args))
    report = measure_bits(folder, SETTINGS, units_path=path)
    assert report == measured(folder)
    total = len(path.read_text().splitlines()) - 1
    assert len(scored) == total - 4
    with pytest.raises(ValueError, match="use_tokens was 16 and is now 8"):
        measure_bits(folder, dataclasses.replace(SETTINGS, use_tokens=8), units_path=path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tasks": ("nonsense",)}, "tasks must be of"),
        ({"length": 20}, "length must be at least 32 tokens for task 'recall_multi', got 20"),
        ({"count": 0}, "count must be >= 1, got 0"),
        ({"use_tokens": 0}, "use_tokens must be >= 1, got 0"),
        ({"seeds": 6}, "seeds must be 1 to 5, got 6"),
        ({"budgets": ("1/4", "5/4")}, "budgets must be over 0 and at most 1, got 1/4, 5/4"),
        ({"budgets": ()}, "budgets must be over 0 and at most 1, got none"),
    ],
)
def test_wrong_settings_are_refused(changed: dict, message: str):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SETTINGS, **changed)
