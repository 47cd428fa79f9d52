"""A grid measured on a tiny random model: bytes, windows, pairing and resuming."""

import dataclasses
from pathlib import Path

import pytest
import torch

import dasc.eval.tune.measure
from dasc.eval.served_model import state_dtypes
from dasc.eval.states import Prefixes, ask, refresh, retain
from dasc.eval.task_runs import load_task_model
from dasc.eval.tune import TuneReport, TuneSettings, measure_points
from dasc.layout import RaggedLayout
from dasc.magnitudes import UnitMagnitudes
from dasc.models import read_checkpoint
from dasc.models.train.evaluate import examples
from dasc.planner import build_plan
from dasc.reference import static_horizons
from tests.eval.replay_runs import save_tiny_model

TASKS = ("recall_single", "parity")
SETTINGS = TuneSettings(w_max=(4, 16), tasks=TASKS, length=40, count=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model(folder, vocab_size=448)
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> TuneReport:
    return measure_points(folder, SETTINGS)


def test_the_grid_has_every_way_at_its_size(report: TuneReport, folder: Path):
    ways = [f"{way} {w}{q}" for w in (4, 16) for q in ("", " INT8", " INT4") for way in ("NR", "WR")]
    assert [point.label for point in report.points] == [*ways, "all INT8", "all INT4"]
    model, checkpoint = load_task_model(folder), read_checkpoint(folder)
    for point in report.points:
        dtypes = state_dtypes(model, quantized=point.quantized)
        plan = build_plan(checkpoint, point.w_max or 4)
        mask = plan.mask if point.w_max else torch.ones_like(plan.mask)
        layout = RaggedLayout.from_mask(checkpoint.geometry, mask, dtypes)
        assert point.checkpoint_bytes == layout.slot_bytes < report.dense_bytes
        assert point.replay_tokens == (point.w_max if point.refresh else 0)
    assert report.dense_bytes == checkpoint.geometry.dense_bytes(state_dtypes(model))
    assert report.examples == 6


def test_observed_units_are_further_ways_of_the_same_sizes(folder: Path, report: TuneReport):
    """With magnitudes that are the horizons, they are the very units of NR."""
    checkpoint = read_checkpoint(folder)
    horizons = static_horizons(checkpoint.gate, checkpoint.gate_input(None))
    magnitudes = UnitMagnitudes(horizons, checkpoint.gate.fingerprint(), {})
    found = measure_points(folder, SETTINGS, magnitudes=magnitudes)
    points = {point.label: point for point in found.points}
    assert [label for label in points if label.startswith("observed")] == [
        f"observed {w}{q}" for w in (4, 16) for q in ("", " INT8", " INT4")
    ]
    for label, point in points.items():
        if point.observed:
            same = points[label.replace("observed", "NR")]
            assert point == dataclasses.replace(same, observed=True)
    assert tuple(point for point in found.points if not point.observed) == report.points
    assert "magnitudes" not in report.settings
    assert found.settings["magnitudes"] == magnitudes.sha256()
    reversed_ = dataclasses.replace(magnitudes, values=1 / horizons)
    others = {p.label: p for p in measure_points(folder, SETTINGS, magnitudes=reversed_).points}
    assert others["observed 16"].checkpoint_bytes == points["observed 16"].checkpoint_bytes
    assert others["observed 16"].log_prob != points["observed 16"].log_prob


def test_a_refresh_of_whole_examples_is_no_way(folder: Path):
    settings = dataclasses.replace(SETTINGS, tasks=TASKS[:1], count=1, w_max=(16, 40))
    labels = [point.label for point in measure_points(folder, settings).points]
    assert "WR 16" in labels
    assert "NR 40" in labels
    assert not [label for label in labels if label.startswith("WR 40")]


def test_losses_are_those_of_each_way_by_hand(report: TuneReport, folder: Path):
    """Paired by example; questions of an example count together as one."""
    model = load_task_model(folder)
    mask = build_plan(read_checkpoint(folder), 16).mask
    lost = []
    for task in TASKS:
        drawn = examples(task, 40, 3)
        held = Prefixes.of(model, [example.context for example in drawn])
        loaded = refresh(retain(held, mask, quantized="int8"), mask, 16)
        for number in range(3):
            asked = [[], [], []]
            asked[number] = drawn[number].questions[:4]
            dense, arm = ask(held, asked).log_prob, ask(loaded, asked).log_prob
            lost.append(float((dense - arm).mean()))
    [point] = [p for p in report.points if p.label == "WR 16 INT8"]
    assert point.log_prob.mean == pytest.approx(sum(lost) / 6, abs=1e-6)
    assert max(lost) >= point.log_prob.upper > point.log_prob.mean


def test_where_nothing_is_omitted_there_is_no_way_to_compress_but_codes(folder: Path):
    """With a lower gate input all horizons are longer than the cutoff."""
    settings = TuneSettings(w_max=(4,), gate_input=-8.0, tasks=("parity",), length=40, count=2)
    only = measure_points(folder, settings)
    assert only.settings["gate_input"] == -8.0
    assert [point.label for point in only.points] == ["all INT8", "all INT4"]


def test_an_interrupted_run_goes_on(folder: Path, report: TuneReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "tune.jsonl"

    def stop(task: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_points(folder, SETTINGS, units_path=path, progress=stop)
    drawn = []
    monkeypatch.setattr(
        dasc.eval.tune.measure,
        "_measure_task",
        lambda *args, real=dasc.eval.tune.measure._measure_task: (drawn.append(1), real(*args))[1],
    )
    assert measure_points(folder, SETTINGS, units_path=path) == report
    assert len(drawn) == 1
    with pytest.raises(ValueError, match="count was 3 and is now 2"):
        measure_points(folder, TuneSettings(w_max=(4, 16), tasks=TASKS, length=40, count=2), units_path=path)


def test_wrong_settings_are_refused():
    for options, message in (
        ({"tasks": ("poetry",)}, "tasks must be of"),
        ({"length": 8}, "length must be at least 32"),
        ({"count": 0, "length": 256}, "count must be >= 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            TuneSettings(**{"tasks": ("parity",), **options})
