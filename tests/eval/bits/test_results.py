"""Means and differences from numbers that are easy to check."""

import pytest

from dasc.eval.bits.results import ALL_TASKS, Score, Spent, summarise


def spent(arm: str, budget: int, *several: list[float]) -> Spent:
    scores = [{"accuracy": a, "log_prob": [x - 1 for x in a], "state_error": [0.5] * len(a)} for a in several]
    return Spent(arm, budget, budget - 1, {"32": 1}, 0.1, scores)


def test_scores_are_means_by_task_and_differences_are_by_example():
    report = summarise(
        {"seed": 0},
        tasks=["a", "a", "b", "b"],
        dense_bytes=100,
        dense={"accuracy": [1.0] * 4, "log_prob": [0.0] * 4, "state_error": [0.0] * 4},
        spending=[
            spent("keep-int8", 10, [1.0, 0.0, 1.0, 0.5]),
            spent("bits-range", 10, [1.0, 1.0, 0.0, 0.5]),
            spent("random-int8", 10, [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]),
            spent("bits-range", 20, [1.0, 1.0, 1.0, 1.0]),
        ],
    )
    assert report.dense["b"] == Score(1.0, 0.0, 0.0)
    kept = report.point("keep-int8", 10)
    assert {task: score.accuracy for task, score in kept.scores.items()} == {"a": 0.5, "b": 0.75, ALL_TASKS: 0.625}
    assert kept.scores["b"].log_prob == pytest.approx(-0.25)
    assert report.point("random-int8", 10).scores[ALL_TASKS].accuracy == 0.25  # over both seeds
    assert report.point("keep-int8", 20) is None
    found = {(d.arm, d.other, d.budget_bytes, d.task, d.measure): d.paired for d in report.differences}
    means = {key[:2] + key[3:4]: p.mean for key, p in found.items() if key[4] == "accuracy"}
    assert means == {
        ("bits-range", "keep-int8", "a"): 0.5,
        ("bits-range", "keep-int8", "b"): -0.5,
        ("bits-range", "keep-int8", ALL_TASKS): 0.0,
        ("keep-int8", "random-int8", "a"): 0.25,
        ("keep-int8", "random-int8", "b"): 0.5,
        ("keep-int8", "random-int8", ALL_TASKS): 0.375,
    }
    pooled = found["bits-range", "keep-int8", 10, ALL_TASKS, "log_prob"]
    assert (pooled.items, pooled.changed) == (4, 2)
    assert pooled.low < 0 < pooled.high
