"""Each arm spends a byte budget, and what it stores loads as the harness's own layouts load."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dasc.eval.bits import ARMS, Units, quantised
from dasc.eval.states import ask, retain
from dasc.reference import (
    RANDOM_MASK_SEEDS,
    allocation_bytes,
    expected_magnitudes,
    head_shares,
    state_magnitude,
    unit_bytes,
    unit_importance,
)
from tests.eval.states.runs import draw_mask, model_of, prefixes_of, questions
from tests.masks import gdn, kda


def units_of(kind: str = "kda", seed: int = 0) -> Units:
    geometry = {"kda": kda, "gdn": gdn}[kind](v_dim=16, k_dim=8)
    generator = torch.Generator().manual_seed(seed)
    shape = (geometry.num_layers, geometry.units_per_layer)
    horizons, magnitudes = (10 ** (3 * torch.rand(shape, generator=generator, dtype=torch.float64)) for _ in range(2))
    return Units(
        geometry,
        unit_importance(horizons, expected_magnitudes(horizons, 256), 16),
        unit_importance(horizons, magnitudes, 16),
        unit_importance(horizons, head_shares(magnitudes, geometry), 16),
    )


@pytest.mark.parametrize("width", [4, 8, 32])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_keep_or_drop_is_the_harness_arm_of_the_same_mask(kind: str, width: int):
    held = prefixes_of(kind)
    before, mask = held.temporal.clone(), draw_mask(held.model)
    loaded = quantised(held, mask.long() * width)
    expected = retain(held, mask, quantized={4: "int4", 8: "int8", 32: None}[width])
    torch.testing.assert_close(loaded.temporal, expected.temporal, rtol=1e-6, atol=0)
    assert torch.equal(ask(loaded, questions()).right, ask(expected, questions()).right)
    assert loaded.conv is held.conv
    assert loaded.kv is held.kv
    assert torch.equal(held.temporal, before)


@given(st.integers(0, 2**31 - 1), st.floats(0, 1), st.sampled_from(["gdn", "kda"]))
def test_no_arm_spends_more_than_the_budget_and_none_leaves_a_unit_of_it(seed: int, share: float, kind: str):
    units = units_of(kind, seed)
    budget = int(share * units.uniform_bytes(32))
    for arm, allocate in ARMS.items():
        for bits in allocate(units, budget):
            spent = allocation_bytes(units.geometry, bits)
            assert spent <= budget, arm
            if arm == "random-int8" or spent < budget - unit_bytes(units.geometry, 32):
                # as many of each layer as the arm that it controls; or nothing more to buy
                [kept] = ARMS["keep-int8"](units, budget)
                assert torch.equal((bits > 0).sum(1), (kept > 0).sum(1)) or (bits > 0).all(), arm


def test_uniform_bits_are_compared_only_at_their_own_bytes():
    units = units_of()
    for width, arm, keep in ((8, "uniform-8", "keep-int8"), (4, "uniform-4", "keep-int4")):
        whole = units.uniform_bytes(width)
        [bits], [kept] = ARMS[arm](units, whole), ARMS[keep](units, whole)
        assert torch.equal(bits, units.uniform(width))
        assert torch.equal(bits, kept)
        assert allocation_bytes(units.geometry, bits) == whole
        assert ARMS[arm](units, whole - 1) == ARMS[arm](units, whole + 1) == []


def test_random_masks_are_those_of_the_seeds():
    units = units_of()
    budget = units.uniform_bytes(32) // 8
    drawn = ARMS["random-int8"](units, budget)
    assert len(drawn) == len(RANDOM_MASK_SEEDS)
    assert len({tuple(bits.flatten().tolist()) for bits in drawn}) == len(drawn)
    assert {int(width) for bits in drawn for width in bits.unique()} == {0, 8}
    for budget in (0, units.uniform_bytes(8)):  # nothing to draw
        assert len(ARMS["random-int8"](units, budget)) == 1


def test_arms_differ_in_what_they_know():
    """By range a large unit of short horizon goes before a small one of long horizon."""
    units = units_of()
    budget = units.uniform_bytes(32) // 8
    [by_horizon], [by_range] = ARMS["keep-int8"](units, budget), ARMS["keep-int8-range"](units, budget)
    assert units.by_horizon[by_horizon == 8].min() > units.by_horizon[by_horizon == 0].max()
    assert units.by_range[by_range == 8].min() > units.by_range[by_range == 0].max()
    assert not torch.equal(by_horizon, by_range)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_magnitudes_are_root_mean_squares_over_all_calibration_prefixes(kind: str):
    held, geometry = prefixes_of(kind), model_of(kind).config.geometry
    horizons = torch.rand(geometry.num_layers, geometry.units_per_layer, dtype=torch.float64) * 50 + 1
    units = Units.of(geometry, horizons, [held, held], prefix_tokens=30, use_tokens=4, seeds=2)
    squares = torch.stack([state_magnitude(held.temporal[:, i], kind) ** 2 for i in range(len(held))])
    torch.testing.assert_close(units.by_range, unit_importance(horizons, squares.mean(0).sqrt(), 4))
    shares = head_shares(squares.mean(0).sqrt(), geometry)
    torch.testing.assert_close(units.by_share, unit_importance(horizons, shares, 4))
    torch.testing.assert_close(units.by_horizon, unit_importance(horizons, expected_magnitudes(horizons, 30), 4))
    assert units.temporal == torch.float64
    assert len(ARMS["random-int8"](units, units.uniform_bytes(8) // 2)) == 2
