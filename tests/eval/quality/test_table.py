"""Table 2's rows and the comparisons behind it, from results made by hand."""

import dataclasses
from collections.abc import Mapping

import numpy as np
import pytest

from dasc.eval.quality.arms import METHODS, ArmSpec, default_w_max, expand
from dasc.eval.quality.results import ArmResult, QualityResult, TaskResult
from dasc.eval.quality.table import ALL_TASKS, QualityTable, make_table
from dasc.eval.statistics import holm, paired
from dasc.reference import RANDOM_MASK_SEEDS

SCORES = {
    "dense": [1.0, 1.0, 0.5, 0.0],
    "nr 16": [1.0, 0.5, 0.5, 0.0],
    "wr 16": [1.0, 1.0, 0.5, 0.0],
    **{f"random 16 {seed}": [0.5, i / 4, 0.0, 0.0] for i, seed in enumerate(RANDOM_MASK_SEEDS)},
}


def task(scores: list[float], cached: int = 90, new: int = 10, **options) -> TaskResult:
    ids = tuple(map(str, range(len(scores))))
    values = {"requests": len(scores), "loaded": len(scores), "ttft_mean_s": 0.5, "outputs_sha256": "0", **options}
    return TaskResult(ids, tuple(scores), cached, new, **values)


def result(arms: Mapping[str, Mapping[str, TaskResult]], model: str = "model", **failures) -> QualityResult:
    found = [
        ArmResult(ArmSpec.parse(label), {}, dict(tasks), (), tuple(failures.get(label.split()[0], ())))
        for label, tasks in arms.items()
    ]
    return QualityResult(model, {}, {}, tuple(found))


def small() -> QualityTable:
    return make_table([result({label: {"x": task(scores)} for label, scores in SCORES.items()})])


def test_a_row_has_a_cell_for_each_method_and_cutoff_and_random_ones_come_together():
    [row] = small().rows
    assert (row.model, row.task, row.items) == ("model", "x", 4)
    assert [(c.method, c.w_max) for c in row.cells] == [("dense", None), ("nr", 16), ("wr", 16), ("random", 16)]
    assert [c.score for c in row.cells[:3]] == [0.625, 0.5, 0.625]
    random = row.cell("random", 16)
    masks = [0.125 + i / 16 for i in range(5)]
    assert random.score == pytest.approx(np.mean(masks))
    assert random.sd == pytest.approx(np.std(masks, ddof=1))
    assert [c.sd for c in row.cells[:3]] == [None] * 3
    assert row.cell("random", 64) is None


def test_the_hit_of_a_row_is_pooled_over_all_arms():
    """By hand: 90 of 100 tokens and 10 of 300: 100 of 400, where the mean of the rates would be 0.4667."""
    arms = {"dense": {"x": task([1.0])}, "nr 16": {"x": task([1.0], 10, 290)}}
    [row] = make_table([result(arms)]).rows
    assert row.hit == 0.25
    assert [c.hit for c in row.cells] == [0.9, 10 / 300]


def test_observed_is_compared_with_nr():
    arms = {"nr 16": {"x": task([0.0, 1.0])}, "observed 16": {"x": task([1.0, 1.0])}, "nr 32": {"x": task([0.0, 0.0])}}
    [comparison] = make_table([result(arms)]).comparisons
    assert (comparison.first, comparison.second, comparison.difference.mean) == ("observed 16", "nr 16", 0.5)


def test_methods_are_compared_with_dense_nr_with_random_and_wr_with_nr():
    """Random is averaged over its masks within each item."""
    comparisons = {(c.first, c.second): c for c in small().comparisons}
    assert set(comparisons) == {
        ("nr 16", "dense"),
        ("wr 16", "dense"),
        ("random 16", "dense"),
        ("nr 16", "random 16"),
        ("wr 16", "nr 16"),
    }
    random = np.array([0.5, 0.5, 0.0, 0.0])
    assert comparisons["nr 16", "random 16"].difference == paired(np.array(SCORES["nr 16"]) - random)
    assert comparisons["nr 16", "random 16"].difference.mean == 0.25
    assert comparisons["nr 16", "dense"].difference.mean == -0.125


def test_p_values_are_adjusted_over_all_task_rows_and_apart_over_the_rows_of_all_items():
    rng = np.random.default_rng(0)

    def scores(shift: float) -> dict[str, TaskResult]:
        return {name: task(list(np.clip(rng.random(30) + shift, 0, 1))) for name in ("x", "y")}

    arms = [{"dense": scores(0), "nr 16": scores(s)} for s in (-0.5, -0.2)]
    table = make_table([result(arms[0], "one"), result(arms[1], "two")])
    of_tasks = [c for c in table.comparisons if c.task != ALL_TASKS]
    overall = [c for c in table.comparisons if c.task == ALL_TASKS]
    assert (len(of_tasks), len(overall)) == (4, 2)
    for family in (of_tasks, overall):
        assert [c.p_holm for c in family] == holm([c.difference.p for c in family])
    assert any(c.p_holm > c.difference.p for c in of_tasks)


def test_the_row_of_all_items_counts_each_of_them_once():
    """Not each task: one has four items, the other two."""
    arms = {label: {"x": task(scores), "y": task([1.0, 1.0], 0, 100)} for label, scores in SCORES.items()}
    *_, row = make_table([result(arms)]).rows
    assert (row.task, row.items, row.hit) == (ALL_TASKS, 6, 0.45)
    assert row.cell("dense", None).score == pytest.approx(4.5 / 6)


def test_mean_time_is_over_requests():
    arms = {"dense": {"x": task([1.0], requests=1, ttft_mean_s=1.0), "y": task([1.0], requests=3, ttft_mean_s=2.0)}}
    rows = make_table([result(arms)]).rows
    assert [row.cells[0].ttft_mean_s for row in rows] == [1.0, 2.0, 1.75]


def test_padded_outputs_must_be_those_of_ragged():
    arms = {"nr 16": {"x": task([1.0])}, "padded 16": {"x": task([1.0])}}
    assert make_table([result(arms)]).failures == ()
    arms["padded 16"] = {"x": task([1.0], outputs_sha256="1")}
    assert make_table([result(arms)]).failures == ("model, padded 16: outputs differ from those of nr 16 on x",)


def test_failures_of_arms_are_in_the_table():
    arms = {"dense": {"x": task([1.0])}, "nr 16": {"x": task([1.0])}}
    table = make_table([result(arms, nr=("x/0: 3 evictions while replaying",))])
    assert table.failures == ("model, nr 16: x/0: 3 evictions while replaying",)


def test_arms_of_other_items_are_refused():
    arms = {"dense": {"x": task([1.0])}, "nr 16": {"x": dataclasses.replace(task([1.0]), item_ids=("other",))}}
    with pytest.raises(ValueError, match="'dense' and 'nr 16' did not measure the same items"):
        make_table([result(arms)])


def test_arms_by_method_cutoff_and_mask():
    labels = [arm.label for arm in expand(["dense", "nr", "random", "int8-all"], [16, 64])]
    masks = [f"random {w} {seed}" for w in (16, 64) for seed in (1234, 2027, 3407, 4519, 5683)]
    assert labels == ["dense", "nr 16", "nr 64", *masks, "int8-all"]
    assert [ArmSpec.parse(label).label for label in labels] == labels


@pytest.mark.parametrize(
    "label", ["", "nr", "dense 16", "nr 16 1234", "random 16", "nr16", "nr x", "other", "nr 1 2 3"]
)
def test_labels_that_name_no_arm_are_refused(label: str):
    with pytest.raises(ValueError, match="arm"):
        ArmSpec.parse(label)


def test_all_compressed_arms_hold_compressed_checkpoints_only():
    assert {name for name, arm in METHODS.items() if arm.spill} == {"dense"}
    with pytest.raises(ValueError, match="got 'off'"):
        expand(["off"], [16])


def test_the_grid_of_cutoffs_suits_the_prompts():
    assert default_w_max(16_384) == (16, 64, 128, 512)
    assert max(default_w_max(512)) < 512
