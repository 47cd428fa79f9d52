import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dasc.reference.selection import RANDOM_MASK_SEEDS, random_mask, select_largest, select_units

seeds = st.integers(0, 2**31 - 1)


def horizons(L: int, U: int, seed: int) -> torch.Tensor:
    return torch.rand(L, U, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 64 + 1e-3


# selection by horizon


@pytest.mark.parametrize("w_max", [4, 16, 64, 128, 512, 1024, 16.5])
def test_cutoff_is_strict_to_the_last_fp64_digit(w_max):
    """Fault 29: a unit at W_max is local, the next number above is global."""
    exact = torch.tensor([[float(w_max)]], dtype=torch.float64)
    above, below = (torch.nextafter(exact, torch.full_like(exact, to)) for to in (math.inf, 0))
    assert select_units(torch.cat([below, exact, above], dim=1), w_max).tolist() == [[False, False, True]]


def test_fp32_horizons_are_refused_because_the_cast_moves_units():
    """Fault 29."""
    above = torch.nextafter(torch.tensor([[16.0]], dtype=torch.float64), torch.tensor([[17.0]], dtype=torch.float64))
    assert select_units(above, 16).item()
    assert not above.float() > 16
    with pytest.raises(ValueError, match="horizons must be float64"):
        select_units(above.float(), 16)


@given(L=st.integers(1, 3), U=st.integers(1, 9), seed=seeds, low=st.floats(1, 60), step=st.floats(0, 60))
def test_larger_cutoff_keeps_a_subset(L, U, seed, low, step):
    H = horizons(L, U, seed)
    wide, narrow = select_units(H, low), select_units(H, low + step)
    assert (narrow <= wide).all()
    assert wide.tolist() == [[h > low for h in row] for row in H.tolist()]


def test_unit_that_never_decays_is_always_kept():
    assert select_units(torch.full((1, 2), math.inf, dtype=torch.float64), 1e300).all()


@pytest.mark.parametrize(
    ("H", "w_max", "message"),
    [
        (torch.ones(3, dtype=torch.float64), 16, "float64"),
        (torch.tensor([[1.0, math.nan]]).double(), 16, "must be positive"),
        (torch.tensor([[1.0, -3.0]]).double(), 16, "must be positive"),
        (torch.zeros(1, 1).double(), 16, "must be positive"),
        (torch.ones(1, 1).double(), 0, "w_max must be"),
        (torch.ones(1, 1).double(), -16, "w_max must be"),
        (torch.ones(1, 1).double(), math.nan, "w_max must be"),
        (torch.ones(1, 1).double(), math.inf, "w_max must be"),
    ],
)
def test_wrong_selection_arguments_are_refused(H, w_max, message):
    with pytest.raises(ValueError, match=message):
        select_units(H, w_max)


# random masks


@st.composite
def masks(draw):
    """Masks with empty and full layers among them."""
    L, U = draw(st.integers(1, 4)), draw(st.integers(1, 40))
    density = torch.tensor(draw(st.lists(st.sampled_from([0.0, 0.3, 0.9, 1.0]), min_size=L, max_size=L)))
    return torch.rand(L, U, generator=torch.Generator().manual_seed(draw(seeds))) < density[:, None]


@given(mask=masks(), seed=st.one_of(st.sampled_from(RANDOM_MASK_SEEDS), st.integers(0, 2**64)))
def test_random_mask_keeps_the_count_of_each_layer_and_repeats_itself(mask, seed):
    before = mask.clone()
    drawn = random_mask(mask, seed)
    assert drawn.dtype == torch.bool
    assert drawn.sum(dim=1).tolist() == mask.sum(dim=1).tolist()
    assert torch.equal(random_mask(mask, seed), drawn)
    assert torch.equal(mask, before)


@given(mask=masks(), seed=seeds)
def test_random_mask_of_a_layer_depends_on_its_own_count_alone(mask, seed):
    drawn = random_mask(mask, seed)
    other = ~mask
    other[-1] = mask[-1].flip(0)  # the same count in other places
    assert torch.equal(random_mask(other, seed)[-1], drawn[-1])


def test_random_mask_uses_no_global_generator():
    mask = horizons(2, 50, 0) > 16
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = random_mask(mask, 1234)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    assert torch.equal(random_mask(mask, 1234), first)


def test_random_mask_is_the_same_on_every_platform():
    mask = torch.zeros(2, 12, dtype=torch.bool)
    mask[0, :4] = mask[1, :3] = True
    drawn = [[row.nonzero().flatten().tolist() for row in random_mask(mask, seed)] for seed in RANDOM_MASK_SEEDS]
    assert drawn == [
        [[1, 6, 8, 9], [3, 10, 11]],
        [[2, 4, 5, 8], [1, 5, 7]],
        [[0, 5, 9, 11], [0, 2, 9]],
        [[2, 7, 9, 11], [0, 10, 11]],
        [[0, 5, 8, 10], [0, 6, 7]],
    ]


def test_random_masks_choose_every_unit_and_pair_equally_often():
    mask = torch.zeros(1, 6, dtype=torch.bool)
    mask[:, :2] = True
    trials = 6000
    drawn = torch.cat([random_mask(mask, seed) for seed in range(trials)]).double()
    together = drawn.T @ drawn
    pairs = together[*torch.triu_indices(6, 6, 1)]
    expected = trials / 15
    # chi squared with 14 degrees of freedom exceeds 36.1 once in a thousand; the seeds are fixed
    assert ((pairs - expected) ** 2 / expected).sum() < 36.1


def test_layers_and_seeds_draw_different_masks():
    mask = torch.zeros(3, 200, dtype=torch.bool)
    mask[:, :100] = True
    drawn = torch.cat([random_mask(mask, seed) for seed in RANDOM_MASK_SEEDS])
    assert len(drawn.unique(dim=0)) == 15
    # independent halves of 200 agree on 100 units give or take 7
    agreement = (drawn[:, None] == drawn[None]).sum(dim=2)[*torch.triu_indices(15, 15, 1)]
    assert agreement.min() > 70
    assert agreement.max() < 130


def test_wrong_random_mask_arguments_are_refused():
    with pytest.raises(ValueError, match="mask must be"):
        random_mask(torch.ones(2, 3), 1234)
    with pytest.raises(ValueError, match="mask must be"):
        random_mask(torch.ones(3, dtype=torch.bool), 1234)
    with pytest.raises(ValueError, match="seed must not be negative"):
        random_mask(torch.ones(2, 3, dtype=torch.bool), -1)


@given(masks(), st.integers(0, 2**31 - 1))
def test_the_largest_units_are_kept_and_no_mask_of_the_size_leaves_less_out(mask, seed):
    """What is left out, squared and added up, is the squared error of a state loaded by NR."""
    signal = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    kept = select_largest(signal, int(mask.sum()))
    assert kept.sum() == mask.sum()
    assert signal[~kept].square().sum() <= signal[~mask].square().sum()


def test_of_equal_units_the_first_are_kept():
    signal = torch.tensor([[1.0, 2.0, 2.0], [2.0, 0.0, math.inf]], dtype=torch.float64)
    assert select_largest(signal, 3).tolist() == [[False, True, True], [False, False, True]]
    assert not select_largest(signal, 0).any()
    assert select_largest(signal, 6).all()


@pytest.mark.parametrize(
    ("signal", "count", "message"),
    [
        (torch.ones(2, 3), 1, r"signal must be float64 \[L, U\], got torch.float32 \[2, 3\]"),
        (torch.ones(3, dtype=torch.float64), 1, r"signal must be float64 \[L, U\], got torch.float64 \[3\]"),
        (torch.full((1, 2), math.nan, dtype=torch.float64), 1, "signal must be numbers, got NaN"),
        (torch.ones(2, 3, dtype=torch.float64), 7, "count must be 0 to 6 units, got 7"),
        (torch.ones(2, 3, dtype=torch.float64), -1, "count must be 0 to 6 units, got -1"),
    ],
)
def test_wrong_arguments_of_a_selection_by_size_are_refused(signal, count, message):
    with pytest.raises(ValueError, match=message):
        select_largest(signal, count)
