"""Appendix B.1: bundle owners, head order and the storage map."""

import time
from itertools import combinations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from dasc.geometry import StateGeometry
from dasc.reference.placement import (
    assign_bundles,
    assign_bundles_literal,
    balance_storage,
    bundle_costs,
    head_order,
    inverse_order,
    key_head_order,
    permute_heads,
    place,
)
from tests.masks import KIMI_LINEAR, gdn, kda, kimi_linear_mask, seeded_mask


def loads_of(costs: Tensor, owners: Tensor, ranks: int) -> list[int]:
    return [int(costs[owners == r].sum()) for r in range(ranks)]


def phi(loads: list[int]) -> tuple[int, int]:
    return max(loads), sum(x * x for x in loads)


def greedy(costs: Tensor, ranks: int) -> list[int]:
    """Loads after steps 1 and 2 alone, written again from the paper."""
    loads = [0] * ranks
    for row in costs.tolist():
        used = [0] * ranks
        for cost in sorted(row, reverse=True):
            r = min((loads[r], used[r], r) for r in range(ranks) if used[r] < len(row) // ranks)[2]
            loads[r] += cost
            used[r] += 1
    return loads


def seeded_costs(ranks: int, quota: int, layers: int, largest: int, heavy: int, seed: int) -> Tensor:
    """Few distinct costs make ties; heavy bundles beside light ones make many swaps."""
    gen = torch.Generator().manual_seed(seed)
    shape = (layers, ranks * quota)
    return torch.randint(0, largest + 1, shape, generator=gen) + torch.randint(0, 2, shape, generator=gen) * heavy


@st.composite
def cost_cases(draw: st.DrawFn) -> tuple[Tensor, int]:
    ranks = draw(st.integers(1, 4))
    quota, layers = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    largest, heavy = draw(st.sampled_from([0, 1, 2, 5, 128])), draw(st.sampled_from([0, 20, 100]))
    return seeded_costs(ranks, quota, layers, largest, heavy, draw(st.integers(0, 2**31 - 1))), ranks


@given(cost_cases())
@example((torch.tensor([[31, 38, 73, 142, 164, 135, 157, 193, 185]]), 3))  # the lowest maximum is not the largest gain
def test_fast_assignment_is_the_literal_one_to_the_last_tie(case: tuple[Tensor, int]):
    costs, ranks = case
    assert torch.equal(assign_bundles(costs, ranks), assign_bundles_literal(costs, ranks))


def test_fast_assignment_is_the_literal_one_in_a_sweep_of_small_shapes():
    """Some choices come up in one case of a hundred, more than property tests try."""
    for seed in range(1500):
        ranks, quota, layers = 2 + seed % 3, 1 + seed // 3 % 3, 1 + seed // 9 % 4
        costs = seeded_costs(ranks, quota, layers, (2, 12, 128)[seed % 4 % 3], (0, 20)[seed // 2 % 2], seed)
        assert torch.equal(assign_bundles(costs, ranks), assign_bundles_literal(costs, ranks)), (costs, ranks)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_fast_assignment_is_the_literal_one_over_many_swaps(ranks: int):
    gen = torch.Generator().manual_seed(ranks)
    costs = torch.randint(0, 2, (12, 16), generator=gen)
    costs[:, : 16 // ranks - 1] += 30
    owners = assign_bundles(costs, ranks)
    assert phi(loads_of(costs, owners, ranks)) < phi(greedy(costs, ranks))
    assert torch.equal(owners, assign_bundles_literal(costs, ranks))


@given(cost_cases())
def test_assignment_keeps_quotas_never_loses_to_greedy_and_is_locally_optimal(case: tuple[Tensor, int]):
    costs, ranks = case
    bundles = costs.shape[1]
    owners = assign_bundles(costs, ranks)
    for row in owners:
        assert torch.bincount(row, minlength=ranks).tolist() == [bundles // ranks] * ranks
    reached = phi(loads_of(costs, owners, ranks))
    assert reached <= phi(greedy(costs, ranks))
    for layer in range(len(costs)):
        for b1, b2 in combinations(range(bundles), 2):
            swapped = owners.clone()
            swapped[layer, [b1, b2]] = owners[layer, [b2, b1]]
            assert phi(loads_of(costs, swapped, ranks)) >= reached


@pytest.mark.parametrize("assign", [assign_bundles, assign_bundles_literal])
@pytest.mark.parametrize(
    ("costs", "ranks", "owners"),
    [
        # all zero: every choice is a tie, so the rank with fewer bundles, then the lower rank
        ([[0, 0, 0, 0]], 2, [[0, 1, 0, 1]]),
        # equal costs go in bundle order; loads carry over to the next layer
        ([[1, 1, 1, 1], [1, 1, 1, 1]], 2, [[0, 1, 0, 1], [0, 1, 0, 1]]),
        # heaviest first: 3 -> 0, then 2 and 2 -> 1 (full), then 1 -> 0
        ([[3, 1, 2, 2]], 2, [[0, 0, 1, 1]]),
        # the second layer starts where the first left off: rank 1 is lighter and takes the 3
        ([[2, 1], [0, 3]], 2, [[0, 1], [0, 1]]),
        # greedy: loads 16 and 8; layers 0 and 2 both have a swap that moves 4, the first is taken
        ([[4, 0], [4, 0], [4, 0], [4, 0], [8, 0]], 2, [[1, 0], [1, 0], [0, 1], [1, 0], [0, 1]]),
        # greedy: loads 6 and 4; bundles 0 and 2 may go for 5 or 7 of layer 0, the pair (0, 5) comes first
        (
            [[1, 1, 1, 1, 0, 0, 0, 0], [4, 2, 0, 0, 0, 0, 0, 0]],
            2,
            [[1, 1, 0, 1, 0, 0, 0, 1], [0, 1, 1, 1, 1, 0, 0, 0]],
        ),
    ],
)
def test_worked_examples(assign, costs: list[list[int]], ranks: int, owners: list[list[int]]):
    assert assign(torch.tensor(costs), ranks).tolist() == owners


@pytest.mark.parametrize("pattern", ["uniform", "heavy and light", "one layer"])
def test_kimi_k3_is_placed_within_a_second(pattern: str):
    gen = torch.Generator().manual_seed(0)
    if pattern == "uniform":
        costs = torch.randint(0, 129, (69, 96), generator=gen)
    elif pattern == "heavy and light":  # the greedy step leaves a spread of over 100, mended by some 200 swaps
        costs = torch.randint(0, 2, (69, 96), generator=gen)
        costs[:, :12] += 126
    else:
        costs = torch.zeros(69, 96, dtype=torch.int64)
        costs[-1] = torch.randint(0, 129, (96,), generator=gen)
    start = time.process_time()
    owners = assign_bundles(costs, 8)
    assert time.process_time() - start < 1.0
    loads = loads_of(costs, owners, 8)
    assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize("assign", [assign_bundles, assign_bundles_literal])
@pytest.mark.parametrize(
    ("costs", "ranks", "message"),
    [
        (torch.zeros(2, 6, dtype=torch.int64), 4, "6 bundles cannot be shared equally by 4 ranks"),
        (torch.zeros(2, 6, dtype=torch.int64), 0, "by 0 ranks"),
        (torch.zeros(2, 6), 2, "int64"),
        (torch.zeros(6, dtype=torch.int64), 2, r"\[L, bundles\]"),
        (torch.zeros(0, 6, dtype=torch.int64), 2, "non-empty"),
        (torch.tensor([[1, -1]]), 2, "negative"),
        (torch.tensor([[2**30, 1]]), 2, "sum to at most"),
        (torch.tensor([[2**62, 2**62]]), 2, "sum to at most"),
    ],
)
def test_wrong_costs_are_refused(assign, costs: Tensor, ranks: int, message: str):
    with pytest.raises(ValueError, match=message):
        assign(costs, ranks)


def test_largest_allowed_costs_do_not_overflow():
    costs = torch.tensor([[2**29, 0], [2**28, 0], [2**28, 0]])
    assert torch.equal(assign_bundles(costs, 2), assign_bundles_literal(costs, 2))
    assert loads_of(costs, assign_bundles(costs, 2), 2) == [2**29, 2**29]


def test_bundle_costs_count_heads_of_gdn_and_channels_of_kda():
    mask = torch.tensor([[1, 1, 1, 0], [0, 0, 0, 1]], dtype=torch.bool)
    assert bundle_costs(gdn(layers=2, key_heads=2, bundle=2), mask).tolist() == [[2, 1], [0, 1]]
    geometry = kda(layers=1, heads=2, k_dim=3)
    costs = bundle_costs(geometry, torch.tensor([[1, 0, 1, 1, 1, 1]], dtype=torch.bool))
    assert costs.tolist() == [[2, 3]]
    assert costs.dtype == torch.int64
    with pytest.raises(ValueError, match="mask"):
        bundle_costs(geometry, torch.ones(1, 5, dtype=torch.bool))


def test_head_order_is_rank_blocks_with_bundles_ascending_and_heads_adjacent():
    geometry = gdn(layers=2, key_heads=4, bundle=2)
    order = head_order(torch.tensor([[1, 0, 1, 0], [0, 0, 1, 1]]), geometry)
    assert order.tolist() == [[2, 3, 6, 7, 0, 1, 4, 5], list(range(8))]


@pytest.mark.parametrize(
    ("owners", "message"),
    [
        (torch.tensor([[0, 1, 0, 0]]), "same number of bundles"),
        (torch.tensor([[0, 2, 2, 0]]), "3 ranks"),
        (torch.tensor([[-1, -1, -1, -1]]), "positive integer"),
        (torch.tensor([[-1, 1, -1, 1]]), "same number of bundles"),
        (torch.tensor([[0, 1, 1]]), "owners must be torch.int64"),
        (torch.tensor([[0.0, 0.0, 1.0, 1.0]]), "owners must be torch.int64"),
    ],
)
def test_unequal_or_malformed_owners_are_refused(owners: Tensor, message: str):
    with pytest.raises(ValueError, match=message):
        head_order(owners, gdn(layers=1, key_heads=4, bundle=2))


@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(0, 2**31 - 1))
def test_hybrid_permutes_whole_bundles_and_every_head_keeps_its_key_head(
    ranks: int, quota: int, bundle: int, layers: int, seed: int
):
    """Fault 27: value heads : key heads of 1, 2, 4, told apart by distinct keys."""
    geometry = gdn(layers=layers, key_heads=ranks * quota, bundle=bundle)
    placement = place(geometry, seeded_mask(geometry, seed), ranks, "hybrid")
    keys = torch.arange(geometry.num_key_heads) + 100
    heads = torch.arange(geometry.num_value_heads)
    for order in placement.head_order:
        assert order.sort().values.tolist() == heads.tolist()
        computed_keys = permute_heads(keys, key_head_order(order, geometry), dim=0)
        assert torch.equal(computed_keys[heads // bundle], keys[order // bundle])
    for rank in range(ranks):
        assert placement.rank_heads(rank).shape == (layers, quota * bundle)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_permuted_heads_move_as_blocks_and_the_inverse_order_brings_them_back(dim: int):
    order = torch.tensor([2, 0, 1])
    tensor = torch.arange(36.0).reshape(6, 6)[:, torch.randperm(6)].T  # strided
    blocks = list(tensor.split(2, dim=dim))
    moved = permute_heads(tensor, order, dim, head_size=2)
    assert torch.equal(moved, torch.cat([blocks[h] for h in order], dim=dim))
    assert torch.equal(permute_heads(moved, inverse_order(order), dim, head_size=2), tensor)
    with pytest.raises(ValueError, match="3 heads of 3 entries, got 6"):
        permute_heads(tensor, order, dim, head_size=3)


def test_permuting_weights_by_heads_permutes_the_function_and_leaves_its_sum():
    """The output projection's input columns follow the heads, so the layer computes what it did."""
    gen = torch.Generator().manual_seed(1)
    value, out = torch.randn(8, 5, generator=gen).double(), torch.randn(7, 8, generator=gen).double()
    x, order = torch.randn(5, generator=gen).double(), torch.tensor([3, 1, 0, 2])
    moved = permute_heads(out, order, dim=1, head_size=2) @ (permute_heads(value, order, dim=0, head_size=2) @ x)
    torch.testing.assert_close(moved, out @ (value @ x), rtol=1e-12, atol=1e-12)


def storage_by_loops(counts: list[int]) -> tuple[list[int], list[list[int]]]:
    """B.1 (b) with one loop a step."""
    ranks = len(counts)
    share, more = divmod(sum(counts), ranks)
    by_count = sorted(range(ranks), key=lambda r: (-counts[r], r))
    targets = [share + 1 if by_count.index(r) < more else share for r in range(ranks)]
    excess = [(r, unit) for r in range(ranks) for unit in range(counts[r]) if unit >= targets[r]]
    deficit = [(r, slot) for r in range(ranks) for slot in range(targets[r]) if slot >= counts[r]]
    return targets, [[*unit, *slot] for unit, slot in zip(excess, deficit, strict=True)]


@given(st.lists(st.integers(0, 12), min_size=1, max_size=6))
def test_storage_map_is_the_one_of_the_paper_and_fills_every_position_once(counts: list[int]):
    targets, moves = balance_storage(counts, len(counts))
    assert (list(targets), moves.tolist()) == storage_by_loops(counts)
    assert moves.dtype == torch.int64
    assert sum(targets) == sum(counts)
    assert max(targets) - min(targets) <= 1
    assert len(moves) == sum(max(0, n - t) for n, t in zip(counts, targets))
    kept = [(r, i) for r, (n, t) in enumerate(zip(counts, targets)) for i in range(min(n, t))]
    filled = kept + [tuple(row[2:]) for row in moves.tolist()]
    assert sorted(filled) == [(r, i) for r, t in enumerate(targets) for i in range(t)]
    stored = kept + [tuple(row[:2]) for row in moves.tolist()]
    assert sorted(stored) == [(r, i) for r, n in enumerate(counts) for i in range(n)]


@given(st.lists(st.integers(0, 9), min_size=2, max_size=4))
def test_no_even_targets_move_fewer_units(counts: list[int]):
    """Against every way to give the ``N mod P`` larger shares."""
    moves = balance_storage(counts, len(counts))[1]
    share, more = divmod(sum(counts), len(counts))
    for larger in combinations(range(len(counts)), more):
        other = [share + (r in larger) for r in range(len(counts))]
        assert sum(max(0, n - t) for n, t in zip(counts, other)) >= len(moves)


def test_storage_example_with_a_remainder():
    # N = 11, q = 3, m = 2: ranks 2 and 0 hold most and take 4
    targets, moves = balance_storage([4, 1, 6], 3)
    assert targets == (4, 3, 4)
    assert moves.tolist() == [[2, 4, 1, 1], [2, 5, 1, 2]]


@pytest.mark.parametrize("counts", [[1, 2], [1, -1, 2], []])
def test_storage_needs_a_count_for_each_rank(counts: list[int]):
    with pytest.raises(ValueError, match="local_units must be 3 counts"):
        balance_storage(counts, 3)


def test_kimi_linear_on_two_ranks_balances_as_published():
    mask = kimi_linear_mask()
    off = place(KIMI_LINEAR, mask, 2, "off")
    assert off.local_units == off.stored_units == (14_787, 14_602)
    assert (off.moved_units, off.slot_units) == (0, 14_787)
    storage = place(KIMI_LINEAR, mask, 2, "storage")
    assert storage.local_units == (14_787, 14_602)
    assert storage.stored_units == (14_695, 14_694)
    assert (storage.moved_units, storage.slot_units) == (92, 14_695)
    hybrid = place(KIMI_LINEAR, mask, 2, "hybrid")
    assert abs(hybrid.local_units[0] - hybrid.local_units[1]) <= 1
    assert hybrid.moved_units <= 1


@given(st.booleans(), st.sampled_from([1, 2, 4]), st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 2**31 - 1))
def test_modes_change_no_more_than_they_say(channels: bool, ranks: int, kept: float, seed: int):
    geometry = kda(layers=3, heads=4) if channels else gdn(layers=3, key_heads=4, bundle=2)
    mask = seeded_mask(geometry, seed, kept)
    off, storage, hybrid = (place(geometry, mask, ranks, mode) for mode in ("off", "storage", "hybrid"))
    assert not off.permutes_heads
    assert off.moved_units == 0
    assert off.stored_units == off.local_units
    assert off.slot_units == max(off.local_units)
    assert not storage.permutes_heads
    assert storage.local_units == off.local_units
    costs = bundle_costs(geometry, mask)
    assert list(hybrid.local_units) == loads_of(costs, assign_bundles(costs, ranks), ranks)
    for balanced in (storage, hybrid):
        assert sum(balanced.stored_units) == int(mask.sum())
        assert balanced.slot_units == -(-int(mask.sum()) // ranks) == balanced.bottleneck_units


def test_one_rank_needs_no_balancing():
    geometry = gdn(key_heads=3)
    mask = seeded_mask(geometry, 0)
    for mode in ("off", "storage", "hybrid"):
        placement = place(geometry, mask, 1, mode)
        assert not placement.permutes_heads
        assert placement.moved_units == 0
        assert placement.slot_units == int(mask.sum())


@pytest.mark.parametrize(("geometry", "ranks"), [(gdn(key_heads=2, bundle=2), 4), (kda(heads=16), 3)])
@pytest.mark.parametrize("mode", ["off", "storage", "hybrid"])
def test_heads_that_ranks_cannot_share_are_refused(geometry: StateGeometry, ranks: int, mode):
    """Fault 28: 2 key heads on 4 ranks, 16 heads on 3."""
    with pytest.raises(ValueError, match=f"{geometry.num_key_heads} key heads .* by {ranks} ranks"):
        place(geometry, seeded_mask(geometry, 0), ranks, mode)


def test_packed_weights_allow_storage_only_and_unknown_modes_are_named():
    geometry = kda()
    mask = seeded_mask(geometry, 0)
    with pytest.raises(ValueError, match="packed quantised weights do not allow; use 'storage'"):
        place(geometry, mask, 2, "hybrid", packed_weights=True)
    for mode in ("off", "storage"):
        assert place(geometry, mask, 2, mode, packed_weights=True).same_as(place(geometry, mask, 2, mode))
    with pytest.raises(ValueError, match="one of off, storage, hybrid, got 'full'"):
        place(geometry, mask, 2, "full")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mask must be"):
        place(geometry, mask[:, 1:], 2, "storage")
