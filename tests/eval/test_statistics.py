"""Statistics against numbers worked by hand, and against what they are said to be."""

import itertools

import numpy as np
import pytest

from dasc.eval.statistics import Paired, holm, mean_and_sd, paired


def test_holm_by_hand():
    """Sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1: 0.02, 0.03, 0.06, and 0.04 raised to 0.06."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.4, 0.6]) == pytest.approx([0.8, 0.8])
    assert holm([0.9, 0.7]) == [1.0, 1.0]
    assert holm([0.03]) == [0.03]
    assert holm([]) == []


def test_holm_is_no_benjamini_hochberg():
    """Which would leave the largest p as it is, and adjust the smaller ones by less."""
    assert holm([0.01, 0.02]) == pytest.approx([0.02, 0.02])
    assert holm([0.01, 0.02, 0.03]) == pytest.approx([0.03, 0.04, 0.04])


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_what_is_no_p_value_is_refused(p: float):
    with pytest.raises(ValueError, match=r"in \[0, 1\]"):
        holm([0.5, p])


def test_sample_deviation_divides_by_one_less():
    assert mean_and_sd([1, 2, 3, 4, 5]) == (3.0, pytest.approx(2.5**0.5))
    with pytest.raises(ValueError, match="at least two"):
        mean_and_sd([1.0])


def sign_flips(differences: list[float]) -> float:
    """Two-sided p of the mean over every combination of signs: twice the smaller tail."""
    observed = np.mean(differences)
    means = [np.mean(np.array(signs) * differences) for signs in itertools.product((1, -1), repeat=len(differences))]
    tails = [np.mean([m >= observed - 1e-12 for m in means]), np.mean([m <= observed + 1e-12 for m in means])]
    return min(1.0, 2 * min(tails))


@pytest.mark.parametrize("d", [[0.5] * 5, [1.0, 0.0, 0.0, 0.5, -0.25, 1.0], [-1.0, -1.0, -0.5, 0.25, -1.0, -1.0, -1.0]])
def test_p_is_exact_for_few_changed_items_and_zeros_do_not_matter(d: list[float]):
    assert paired(d).p == pytest.approx(sign_flips(d))
    assert paired([*d, *[0.0] * 20]).p == paired(d).p


def test_p_of_many_changed_items_is_close_to_exact():
    d = np.random.default_rng(1).normal(0.5, 1, size=16)
    assert paired(d).p == pytest.approx(sign_flips(list(d)), abs=0.02)


def test_the_interval_holds_the_mean_and_follows_a_skew():
    d = [1.0] * 3 + [0.0] * 27
    result = paired(d)
    assert result.low <= result.mean <= result.high
    assert result.high - result.mean > result.mean - result.low > 0
    assert (result.items, result.changed) == (30, 3)
    mirrored = paired([-x for x in d])
    assert (mirrored.low, mirrored.high) == pytest.approx((-result.high, -result.low), abs=0.02)
    assert mirrored.p == pytest.approx(result.p)


def test_the_interval_covers_as_often_as_it_says():
    """Of 80 samples of size 40, about 95 % cover the mean; fewer than 85 % would be a fault."""
    rng = np.random.default_rng(0)
    covered = [r.low <= 0.1 <= r.high for r in (paired(rng.normal(0.1, 1, 40)) for _ in range(80))]
    assert 0.85 < np.mean(covered) < 1.0


def test_equal_differences_are_a_point():
    assert paired([0.0] * 30) == Paired(0.0, 0.0, 0.0, 1.0, 30, 0)
    assert (paired([0.25] * 3).low, paired([0.25] * 3).high) == (0.25, 0.25)
    assert paired([1.0]).p == 1.0


def test_the_same_differences_give_the_same_numbers():
    d = np.random.default_rng(2).normal(size=30)
    assert paired(d) == paired(list(d))


@pytest.mark.parametrize("d", [[], [float("nan"), 0.0], [[0.0, 1.0]]])
def test_what_is_no_sample_is_refused(d: list):
    with pytest.raises(ValueError, match="must be finite and at least one"):
        paired(d)
