"""Bits under a byte budget: nearly the least modelled cost, never more bytes."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dasc.geometry import StateGeometry
from dasc.reference import select_units
from dasc.reference.bit_allocation import (
    _hull,
    allocate_bits,
    decayed_tokens,
    expected_magnitudes,
    head_shares,
    modelled_cost,
    relative_errors,
    unit_importance,
)
from dasc.reference.bits import BITS, allocation_bytes, unit_bytes
from tests.masks import gdn, kda

TINY = (
    kda(layers=1, heads=1, v_dim=32, k_dim=4),
    kda(layers=1, heads=1, v_dim=2, k_dim=4),  # four bits take more bytes than sixteen
    gdn(layers=2, key_heads=1, bundle=2, v_dim=8, k_dim=3),
)
seeds = st.integers(0, 2**31 - 1)


def drawn_importance(geometry: StateGeometry, seed: int) -> torch.Tensor:
    """Over many decades, some equal and some zero."""
    rng = np.random.default_rng(seed)
    values = 10.0 ** rng.integers(-6, 3, (geometry.num_layers, geometry.units_per_layer))
    return torch.from_numpy(values * rng.choice([0.0, 1.0, 1.0, 1.7], values.shape))


def least_cost(importance: torch.Tensor, budget: int, geometry: StateGeometry, widths=BITS) -> float:
    """By trying all allocations."""
    errors = relative_errors(geometry)
    costs = []
    for choice in itertools.product(widths, repeat=geometry.num_units):
        if sum(unit_bytes(geometry, width) for width in choice) <= budget:
            costs.append(sum(i * errors[w] for i, w in zip(importance.flatten().tolist(), choice)))
    return min(costs)


def first_step_left_out(importance: torch.Tensor, bits: torch.Tensor, geometry: StateGeometry) -> float:
    """What the step that saves most a byte, of all that remain, would save."""
    errors = relative_errors(geometry)
    steps = [(0.0, 0.0)]
    for value, width in zip(importance.flatten().tolist(), bits.flatten().tolist()):
        for wider in BITS:
            saves = value * (errors[width] - errors[wider])
            more = unit_bytes(geometry, wider) - unit_bytes(geometry, width)
            if more > 0 and saves > 0:
                steps.append((saves / more, saves))
    return max(steps)[1]


@settings(max_examples=40)
@given(st.sampled_from(TINY), seeds, st.floats(0, 1.1))
def test_cost_is_the_least_but_for_one_step(geometry: StateGeometry, seed: int, share: float):
    importance = drawn_importance(geometry, seed)
    budget = int(share * geometry.temporal_bytes())
    bits = allocate_bits(importance, budget, geometry)
    cost, least = modelled_cost(importance, bits, geometry), least_cost(importance, budget, geometry)
    assert allocation_bytes(geometry, bits) <= budget
    assert least * (1 - 1e-9) <= cost <= least * (1 + 1e-9) + first_step_left_out(importance, bits, geometry)


@settings(max_examples=40)
@given(st.sampled_from(TINY), seeds, st.floats(-9, 3))
def test_cost_is_the_least_where_the_steps_spend_the_budget(geometry: StateGeometry, seed: int, price: float):
    """At a price of a byte each unit has a best width by itself. Their bytes are such a budget."""
    importance, errors = drawn_importance(geometry, seed), relative_errors(geometry)

    def spend(value: float) -> int:
        return unit_bytes(
            geometry, min(BITS, key=lambda width: value * errors[width] + 10**price * unit_bytes(geometry, width))
        )

    budget = sum(spend(value) for value in importance.flatten().tolist())
    bits = allocate_bits(importance, budget, geometry)
    assert allocation_bytes(geometry, bits) == budget
    assert modelled_cost(importance, bits, geometry) == pytest.approx(least_cost(importance, budget, geometry))


@settings(max_examples=10)
@given(seeds, st.integers(40, 300), st.sampled_from([gdn, kda]))
def test_more_budget_never_costs_more_and_is_never_exceeded(seed: int, step: int, kind):
    geometry = kind(v_dim=16, k_dim=4)
    importance = drawn_importance(geometry, seed)
    costs = []
    for budget in range(0, geometry.temporal_bytes() + step, step):
        bits = allocate_bits(importance, budget, geometry)
        assert allocation_bytes(geometry, bits) <= budget
        costs.append(modelled_cost(importance, bits, geometry))
    assert all(after <= before for before, after in itertools.pairwise(costs))
    assert costs[0] == pytest.approx(float(importance.sum()))
    assert costs[-1] == 0


@given(seeds, st.sampled_from([8, 32]), st.floats(0, 1))
def test_keep_or_drop_keeps_the_most_important_units(seed: int, width: int, share: float):
    geometry = kda(v_dim=16)
    importance = torch.rand(2, 20, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    budget = int(share * geometry.temporal_bytes())
    bits = allocate_bits(importance, budget, geometry, widths=(0, width))
    kept = min(budget // unit_bytes(geometry, width), geometry.num_units)
    assert int((bits == width).sum()) == kept
    assert int((bits == 0).sum()) == geometry.num_units - kept
    if 0 < kept < geometry.num_units:
        assert importance[bits == width].min() > importance[bits == 0].max()


def test_by_horizon_alone_the_selection_of_the_paper_is_kept():
    """Any cutoff's selection is what keep-or-drop keeps in the bytes of that selection."""
    geometry = kda(layers=2, heads=4, v_dim=8)
    horizons = 10 ** torch.linspace(-1, 5, 40, dtype=torch.float64)[torch.randperm(40)].view(2, 20)
    importance = unit_importance(horizons, expected_magnitudes(horizons, 256), 16)
    for w_max in (4, 16, 64, 512):
        mask = select_units(horizons, w_max)
        budget = allocation_bytes(geometry, mask.long() * 32)
        assert torch.equal(allocate_bits(importance, budget, geometry, widths=(0, 32)) == 32, mask)


@pytest.mark.parametrize("geometry", [kda(v_dim=32, k_dim=32), gdn(v_dim=16, k_dim=32), kda(v_dim=128, k_dim=4)])
def test_relative_errors_are_those_of_uniform_noise(geometry: StateGeometry):
    """A step's square over 12, with the largest of V normal values as the scale: between 1 and 10 of mean square."""
    errors = relative_errors(geometry)
    assert (errors[0], errors[32]) == (1.0, 0.0)
    for width, qmax in ((4, 7), (8, 127)):
        assert 1 < errors[width] * 12 * qmax**2 < 10
    assert errors[16] == pytest.approx(2**-20 / 12 / 2, rel=0.2)  # significands from 1 to 2


def test_decay_is_summed_token_by_token():
    horizons = torch.tensor([0.5, 3.0, 40.0, 1e9, torch.inf], dtype=torch.float64)
    for tokens in (1, 2, 17):
        alpha = 1e-2 ** (1 / horizons)
        expected = sum(alpha ** (2 * t) for t in range(tokens))
        torch.testing.assert_close(decayed_tokens(horizons, tokens, 1e-2), expected)
        torch.testing.assert_close(expected_magnitudes(horizons, tokens, 1e-2), expected.sqrt())
        read = sum(alpha ** (2 * t) for t in range(1, tokens + 1))
        torch.testing.assert_close(
            unit_importance(horizons, horizons.clamp(max=9), tokens, 1e-2), horizons.clamp(max=9) ** 2 * read
        )


def test_shares_are_of_the_head():
    magnitudes = torch.tensor([[3.0, 4.0, 0.0, 0.0, 1e-9, 0.0]], dtype=torch.float64)
    shares = head_shares(magnitudes, kda(layers=1, heads=3, k_dim=2))
    assert shares.flatten().tolist() == pytest.approx([0.6, 0.8, 0, 0, 1, 0])
    geometry = gdn(layers=1, key_heads=2)
    assert head_shares(torch.rand(1, 4, dtype=torch.float64) + 1, geometry).flatten().tolist() == [1.0] * 4


def test_steps_are_those_of_the_convex_hull():
    """Out: a point above the line between its neighbours, and points that cost more bytes for as much error or more."""
    points = [(0, 1.0, 0), (4, 0.9, 4), (5, 0.2, 8), (6, 0.2, 16), (9, 0.0, 32), (9, 0.1, 16), (12, 0.0, 32)]
    assert _hull(points) == [(0, 1.0, 0), (5, 0.2, 8), (9, 0.0, 32)]


def test_wrong_arguments_are_refused():
    geometry = kda()
    good = torch.ones(2, 20, dtype=torch.float64)
    for wrong, message in (
        (good.float(), "importance must be float64 "),
        (good[:1], "importance must be float64 "),
        (-good, "importance must be finite and not negative"),
        (good * torch.inf, "importance must be finite and not negative"),
    ):
        with pytest.raises(ValueError, match=message):
            allocate_bits(wrong, 100, geometry)
    with pytest.raises(ValueError, match="budget_bytes must not be negative, got -1"):
        allocate_bits(good, -1, geometry)
    with pytest.raises(ValueError, match=r"widths must have 0 among them, got \(8, 32\)"):
        allocate_bits(good, 100, geometry, widths=(8, 32))
    with pytest.raises(ValueError, match="bits must be out of"):
        allocate_bits(good, 100, geometry, widths=(0, 3))
    with pytest.raises(ValueError, match="magnitudes must be finite and not negative"):
        unit_importance(good, -good, 16)
    with pytest.raises(ValueError, match="magnitudes must be float64"):
        unit_importance(good, good[:1], 16)
    with pytest.raises(ValueError, match="horizons must be float64 and positive"):
        decayed_tokens(-good, 16)
    with pytest.raises(ValueError, match="tokens must be at least 1, got 0"):
        decayed_tokens(good, 0)
    with pytest.raises(ValueError, match="epsilon must be within"):
        decayed_tokens(good, 1, 1.0)
