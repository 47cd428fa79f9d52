"""Front and choice on points made by hand."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dasc.eval.tune import Choice, Loss, Point, choose, pareto, upper_limit
from dasc.eval.tune.points import fewest_examples

KIB = 1024
MEMORY = 100 * KIB


def point(w_max: int, kib: float, mean: float, upper: float | None = None, replay: int = 0, **fields) -> Point:
    loss = Loss(mean, mean + 0.005 if upper is None else upper)
    return Point(
        w_max, replay > 0, False, None, int(kib * KIB), replay, **{"accuracy": loss, "log_prob": loss, **fields}
    )


def chosen(points: list[Point], budget: float = 0.01, memory_bytes: int = MEMORY) -> Choice:
    return choose(points, budget=budget, memory_bytes=memory_bytes, dense_bytes=20 * KIB)


def labels(points: list[Point]) -> list[str]:
    return [p.label for p in points]


BIG, MIDDLE, SMALL = point(4, 10, 0.0), point(16, 5, 0.004), point(64, 2, 0.03)


def test_the_front_leaves_out_what_another_beats():
    beaten = point(8, 6, 0.004)
    worse = point(32, 5, 0.02)
    refreshed = point(16, 5, 0.004, replay=16)  # as small and as good as NR, and slower
    better = point(64, 2, 0.01, replay=64)
    front = pareto([beaten, BIG, refreshed, SMALL, worse, MIDDLE, better], "accuracy")
    assert labels(front) == ["WR 64", "NR 16", "NR 4"]


losses = st.sampled_from([0.0, 0.1, 0.2, 0.3])


@given(st.lists(st.tuples(st.integers(1, 4), losses, st.integers(0, 1)), min_size=1, max_size=8))
def test_the_front_is_what_no_other_beats(drawn: list[tuple[int, float, int]]):
    points = [point(number + 4, kib, mean, replay=replay) for number, (kib, mean, replay) in enumerate(drawn)]

    def at(p: Point) -> tuple[int, float]:
        return p.checkpoint_bytes, p.accuracy.mean

    def beaten(p: Point) -> bool:
        return any(at(o) != at(p) and at(o)[0] <= at(p)[0] and at(o)[1] <= at(p)[1] for o in points)

    front = pareto(points, "accuracy")
    assert [at(p) for p in front] == sorted({at(p) for p in points if not beaten(p)})
    for p, other in itertools.product(front, points):
        assert at(p) != at(other) or p.replay_tokens <= other.replay_tokens


def test_the_smallest_within_the_budget_is_chosen_by_its_upper_limit():
    choice = chosen([BIG, MIDDLE, SMALL])
    assert choice.point == MIDDLE
    assert choice.front == ("NR 64", "NR 16", "NR 4")
    assert choice.explanation == (
        "NR 16: 19 checkpoints of 5.00 KiB fit in 100.00 KiB, where 4 dense ones would.",
        "It loses 0.40 points of accuracy, and at 95 % confidence no more than 0.90 points of accuracy; "
        "the budget is 1.00 points of accuracy.",
        "The next smaller one, NR 64 (2.00 KiB, 49 checkpoints), would lose 3.00 points of accuracy, "
        "and at 95 % confidence no more than 3.50 points of accuracy.",
    )
    uncertain = point(16, 5, 0.004, upper=0.0101)
    assert chosen([BIG, uncertain, SMALL]).point == BIG
    assert chosen([BIG, MIDDLE, SMALL], budget=0.5).point == SMALL
    assert chosen([BIG, MIDDLE, SMALL], budget=0.5).explanation[-1].startswith("No smaller one")


def test_the_measure_that_was_asked_for_decides():
    costly = point(64, 2, 0.0, log_prob=Loss(0.5, 0.6))
    for measure, expected in (("accuracy", costly), ("log_prob", MIDDLE)):
        choice = choose([MIDDLE, costly], budget=0.01, memory_bytes=MEMORY, dense_bytes=KIB, measure=measure)
        assert choice.point == expected


def test_of_as_many_checkpoints_the_one_that_replays_least_is_chosen():
    slow = point(16, 5, 0.0, replay=16)
    assert chosen([slow, MIDDLE]).point == MIDDLE
    fits_as_often = point(8, 5.1, 0.0, replay=8)
    assert chosen([fits_as_often, slow], memory_bytes=104 * KIB).point == fits_as_often


def test_when_nothing_fits_it_says_so():
    none = chosen([MIDDLE, SMALL], budget=0.001)
    assert none.point is None
    assert "NR 16 comes nearest: it loses 0.40 points" in none.explanation[1]
    assert "Measure more examples (it takes 3,688 or more)" in none.explanation[2]
    assert "4 dense ones fit in 100.00 KiB" in none.explanation[2]
    tight = chosen([BIG, MIDDLE, SMALL], memory_bytes=9 * KIB)
    assert tight.point is None
    assert "the smallest, NR 16, takes 5.00 KiB" in tight.explanation[0]
    assert chosen([BIG, MIDDLE, SMALL], memory_bytes=10 * KIB).point == MIDDLE


@pytest.mark.parametrize("arguments", [([], 0.1), ([BIG], -0.1), ([BIG], float("nan"))])
def test_wrong_arguments_are_refused(arguments):
    with pytest.raises(ValueError, match="points must hold at least one and budget be >= 0"):
        chosen(*arguments)


def test_no_loss_in_few_examples_is_no_proof():
    """By the binomial law: with this probability of a loss, none in n is seen in 2.5 % of samples."""
    for n in (1, 20, 300):
        limit = upper_limit([0.0] * n, "accuracy")
        assert (1 - limit) ** n == pytest.approx(0.025)
        assert fewest_examples(limit * 1.0001) == n
        assert upper_limit([-0.25, *[0.0] * (n - 1)], "accuracy") == limit  # a gain is no proof, either
    assert upper_limit([0.0, 0.0, 1.0, 0.0] * 5, "accuracy") > 0.25
    assert upper_limit([0.1] * 5, "log_prob") == pytest.approx(0.1)
