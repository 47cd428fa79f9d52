"""Accuracy after parts of a prefix were zeroed: each arm on the same prefixes, counted and bounded as it says."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from dasc.eval import interventions
from dasc.eval.interventions import Accuracy, InterventionSettings, accuracy, measure_interventions
from dasc.eval.states import Answers, Prefixes, ask, zero_temporal
from dasc.eval.task_runs import load_task_model
from dasc.models.train.evaluate import examples
from tests.eval.task_models import save_task_model

SMALL = InterventionSettings(tasks=("recall_multi", "parity"), length=40, count=3, questions=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_task_model(tmp_path_factory.mktemp("models") / "kda")


def test_the_interval_is_wilsons():
    """8 of 10: the textbook's [0.490, 0.943]; shares at the ends keep an interval within [0, 1]."""
    right = torch.tensor([True] * 8 + [False] * 2)
    found = accuracy(right, torch.tensor([True, False, False, False]), torch.tensor([-1.0, -3.0]))
    assert (found.questions, found.right, found.share) == (10, 8, 0.8)
    assert (round(found.low, 4), round(found.high, 4)) == (0.4902, 0.9433)
    assert (found.token_share, found.token_log_prob) == (0.25, -2.0)
    none = accuracy(torch.zeros(10, dtype=torch.bool), right, torch.zeros(1))
    assert (none.low, round(none.high, 4)) == (0.0, 0.2775)


def test_each_arm_is_asked_what_the_settings_say(folder: Path):
    model = load_task_model(folder)
    arms = ("baseline", "zero-full-kv", "zero-linear", "zero-temporal", "zero-both")
    found = interventions.intervene(model, "recall_multi", dataclasses.replace(SMALL, arms=arms))
    assert tuple(found) == arms
    drawn = examples("recall_multi", 40, 3, 0)
    held = Prefixes.of(model, [example.context for example in drawn])
    for arm, changed in (("baseline", held), ("zero-temporal", zero_temporal(held))):
        expected = ask(changed, [example.questions[:2] for example in drawn])
        assert found[arm]["questions"] == 6
        assert found[arm]["right"] == int(expected.right.sum())
        assert found[arm]["token_log_prob"] == float(expected.token_log_prob.mean())
    assert len({values["token_log_prob"] for values in found.values()}) == len(arms)


def test_all_arms_reuse_one_prefill_and_the_baseline_comes_out_the_same_after_the_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    prefills: list[Prefixes] = []
    asked: list[Answers] = []
    plain = Prefixes.of

    def counted(model, contexts):
        prefills.append(plain(model, contexts))
        return prefills[-1]

    def kept(prefixes, questions):
        asked.append(ask(prefixes, questions))
        return asked[-1]

    monkeypatch.setattr(Prefixes, "of", counted)
    monkeypatch.setattr(interventions, "ask", kept)
    arms = ("baseline", "zero-both", "zero-full-kv", "zero-linear")
    interventions.intervene(load_task_model(folder), "parity", dataclasses.replace(SMALL, arms=arms))
    assert len(prefills) == 1
    questions = [example.questions[:2] for example in examples("parity", 40, 3, 0)]
    assert torch.equal(ask(prefills[0], questions).token_log_prob, asked[0].token_log_prob)


def test_a_run_that_was_interrupted_goes_on_and_another_setting_is_refused(folder: Path, tmp_path: Path):
    whole = measure_interventions(folder, SMALL)
    units = tmp_path / "units.jsonl"

    def interrupt(task: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_interventions(folder, SMALL, units_path=units, progress=interrupt)
    assert len(units.read_text().splitlines()) == 2
    done: list[str] = []
    resumed = measure_interventions(folder, SMALL, units_path=units, progress=done.append)
    assert resumed == whole
    assert done == ["recall_multi", "parity"]
    with pytest.raises(ValueError, match="cannot be resumed: seed was 0 and is now 1"):
        measure_interventions(folder, dataclasses.replace(SMALL, seed=1), units_path=units)


def test_the_report_is_json_with_all_settings(folder: Path):
    report = measure_interventions(folder, SMALL)
    values = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert Accuracy(**values["tasks"]["parity"]["zero-both"]) == report.tasks["parity"]["zero-both"]
    for name in ("model", "model_sha256", "versions", *(f.name for f in dataclasses.fields(SMALL))):
        assert name in values["settings"], name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": ("parity", "chess")}, "tasks must be of .* got 'chess'"),
        ({"tasks": ()}, "tasks must be of .* got none"),
        ({"tasks": ("text",)}, "length must be at least 184 tokens for task 'text', got 40"),
        ({"arms": ("zero",)}, "arms must be of .* got 'zero'"),
        ({"arms": ()}, "arms must be of .* got 'none'"),
        ({"count": 0}, "count must be >= 1, got 0"),
        ({"questions": 0}, "questions must be >= 1, got 0"),
    ],
)
def test_wrong_settings_are_refused(change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


def test_a_model_without_the_tasks_ids_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="must have the 448 token ids of the tasks, it has 260"):
        measure_interventions(save_task_model(tmp_path / "small", vocab_size=260), SMALL)
