"""Observed magnitudes: what the file holds, whose they are, and plans that go by them."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from dasc.eval import magnitudes as measuring
from dasc.eval.horizons import task_prefixes
from dasc.eval.horizons.measure import observe
from dasc.eval.magnitudes import measure_magnitudes
from dasc.eval.task_runs import load_task_model
from dasc.magnitudes import UnitMagnitudes
from dasc.models import Checkpoint, read_checkpoint
from dasc.planner import build_plan, summarise
from dasc.reference import select_largest, static_horizons
from tests.eval.task_models import save_task_model
from tests.masks import seeded_magnitudes

W_MAX = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_task_model(tmp_path_factory.mktemp("models") / "kda")


@pytest.fixture(scope="module")
def checkpoint(folder: Path) -> Checkpoint:
    return read_checkpoint(folder)


@pytest.mark.parametrize(("kind", "gate"), [("gdn", "softplus"), ("kda", "softplus"), ("kda", "safe")])
def test_they_are_the_root_mean_square_of_the_states_after_the_prefixes(tmp_path: Path, kind: str, gate: str):
    folder = save_task_model(tmp_path / "model", kind, gate)
    prefixes = task_prefixes((64, 32), 2, seed=1)
    found = measure_magnitudes(folder, prefixes, source={"from": "here"})
    model = load_task_model(folder)
    squares = [observe(model, prefix.tokens)[1] ** 2 for prefix in prefixes]
    torch.testing.assert_close(found.values, (sum(squares) / 4) ** 0.5)
    assert found.source["source"] == {"from": "here"}
    assert [p["tokens"] for p in found.source["prefixes"]] == [len(p.tokens) for p in prefixes]
    found.check(read_checkpoint(folder))


def test_finished_prefixes_are_not_run_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    prefixes = task_prefixes((32,), 3)
    path = tmp_path / "magnitudes.jsonl"
    whole = measure_magnitudes(folder, prefixes, source={}, units_path=path)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))  # interrupted before the last
    runs = []
    monkeypatch.setattr(
        "dasc.eval.magnitudes._magnitudes",
        lambda model, tokens, real=measuring._magnitudes: (runs.append(tokens), real(model, tokens))[1],
    )
    again = measure_magnitudes(folder, prefixes, source={}, units_path=path)
    assert runs == [prefixes[-1].tokens]
    assert torch.equal(again.values, whole.values)
    with pytest.raises(ValueError, match=r"prefixes_sha256 was .* take another output folder"):
        measure_magnitudes(folder, prefixes[1:], source={}, units_path=path)
    with pytest.raises(ValueError, match="prefixes must be at least one, got none"):
        measure_magnitudes(folder, [], source={})


def test_a_file_gives_back_what_was_written(checkpoint: Checkpoint, tmp_path: Path):
    path = tmp_path / "magnitudes.json"
    magnitudes = seeded_magnitudes(checkpoint)
    path.write_text(json.dumps(magnitudes.as_dict() | {"more": 1}))
    read = UnitMagnitudes.load(path)
    assert torch.equal(read.values, magnitudes.values)
    assert (read.fingerprint, read.source) == (magnitudes.fingerprint, magnitudes.source)


@pytest.mark.parametrize(
    "change",
    [
        {"magnitudes": [[1.0, -1.0]]},
        {"magnitudes": [[1.0, math.nan]]},
        {"magnitudes": [[1.0], [1.0, 2.0]]},
        {"magnitudes": [1.0]},
        {"magnitudes": "large"},
        {"fingerprint": 3},
        {"source": "tasks"},
    ],
    ids=str,
)
def test_a_file_of_something_else_is_refused(checkpoint: Checkpoint, tmp_path: Path, change: dict[str, object]):
    path = tmp_path / "magnitudes.json"
    path.write_text(json.dumps(seeded_magnitudes(checkpoint).as_dict() | change))
    with pytest.raises(ValueError, match=r"magnitudes\.json holds no magnitudes, as dasc observe writes them"):
        UnitMagnitudes.load(path)


@pytest.mark.parametrize("text", ["", "[]", "{}", "{"])
def test_a_file_without_the_fields_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "magnitudes.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="holds no magnitudes"):
        UnitMagnitudes.load(path)


def test_those_of_another_model_are_refused(checkpoint: Checkpoint):
    magnitudes = seeded_magnitudes(checkpoint)
    other = dataclasses.replace(magnitudes, fingerprint=f"sha256:{'0' * 64}")
    smaller = dataclasses.replace(magnitudes, values=magnitudes.values[:, :-1])
    for wrong, message in (
        (other, "observed of the weights sha256:0000"),
        (smaller, r"magnitudes must be \[\d+, \d+\]"),
    ):
        with pytest.raises(ValueError, match=message):
            build_plan(checkpoint, W_MAX, magnitudes=wrong)
        with pytest.raises(ValueError, match=message):
            summarise(checkpoint, [W_MAX], ranks=(1,), magnitudes=wrong)


def test_a_plan_keeps_as_many_units_as_the_cutoff_and_the_largest(checkpoint: Checkpoint):
    magnitudes = seeded_magnitudes(checkpoint)
    plain, plan = (build_plan(checkpoint, W_MAX, ranks=(1, 2), magnitudes=m) for m in (None, magnitudes))
    assert torch.equal(plan.mask, select_largest(magnitudes.values, int(plain.mask.sum())))
    assert not torch.equal(plan.mask, plain.mask)
    # units with long horizons may be left out now; their windows are the longest there are
    horizons = static_horizons(checkpoint.gate, checkpoint.gate_input(None))
    assert (plan.windows[~plan.mask & (horizons > W_MAX)] == W_MAX).all()
    assert (plan.windows[plan.mask] == 0).all()
    with pytest.raises(ValueError, match="mask_seed and magnitudes must not both be given"):
        build_plan(checkpoint, W_MAX, magnitudes=magnitudes, mask_seed=1)


def test_the_summary_is_of_the_plan(checkpoint: Checkpoint):
    magnitudes = seeded_magnitudes(checkpoint)
    plan = build_plan(checkpoint, W_MAX, ranks=(2,), mode="storage", magnitudes=magnitudes)
    [window] = summarise(checkpoint, [W_MAX], ranks=(2,), magnitudes=magnitudes).windows
    assert window.units_kept == int(plan.mask.sum())
    [balanced] = [rank for rank in window.ranks if rank.mode == "storage"]
    assert balanced.slot_bytes == max(layout.slot_bytes for layout in plan.layouts(2))
    shares = plan.mask.double().mean(dim=1)
    assert window.layer_fraction == (float(shares.min()), float(shares.max()))
