"""Routes of the ranks against the placement they come from."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dasc.fast.distributed import PeerUnits, Routes, row_bytes
from dasc.geometry import DtypePolicy
from dasc.layout import RaggedLayout
from dasc.placement import PLACEMENT_MODES, Placement
from dasc.reference import place
from tests.masks import KIMI_LINEAR, gdn, kda, kimi_linear_mask, seeded_mask


@given(
    ranks=st.sampled_from([1, 2, 4, 8]),
    mode=st.sampled_from(PLACEMENT_MODES),
    kept=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    channels=st.booleans(),
    seed=st.integers(0, 2**31 - 1),
)
def test_routes_of_all_ranks_are_the_moves_of_the_placement(ranks, mode, kept, channels, seed):
    geometry = kda(heads=8) if channels else gdn(key_heads=8)
    placement = place(geometry, seeded_mask(geometry, seed, kept), ranks, mode)
    everyone = [Routes.of(placement, rank) for rank in range(ranks)]
    moves = []
    for routes in everyone:
        assert routes.kept + routes.sent.count == routes.local_units == placement.local_units[routes.rank]
        assert routes.kept + routes.received.count == routes.stored_units == placement.stored_units[routes.rank]
        unit = routes.sent.first
        for peer, size in enumerate(routes.sent.splits):
            assert everyone[peer].received.splits[routes.rank] == size
            before = sum(everyone[peer].received.splits[: routes.rank])
            for i in range(size):
                moves.append([routes.rank, unit, peer, everyone[peer].received.first + before + i])
                unit += 1
    assert moves == placement.moves.tolist()


@given(splits=st.lists(st.integers(0, 4), min_size=1, max_size=5), checkpoints=st.integers(1, 3))
def test_rows_of_a_buffer_are_by_peer_then_checkpoint_then_unit(splits, checkpoints):
    peers = PeerUnits(7, tuple(splits))
    expected, row = {}, 0
    unit = 0
    for size in splits:
        for i in range(checkpoints):
            for j in range(size):
                expected[i, unit + j] = row
                row += 1
        unit += size
    starts, sizes = peers.groups()
    j = torch.arange(peers.count)
    for i in range(checkpoints):
        rows = checkpoints * starts + i * sizes + (j - starts)
        assert rows.tolist() == [expected[i, unit] for unit in j.tolist()]
    seen = torch.full((checkpoints, peers.count), -1)
    for units, part in peers.parts(torch.arange(row)[:, None], checkpoints):
        seen[:, units] = part[..., 0]
    assert seen.tolist() == [[expected[i, unit] for unit in j.tolist()] for i in range(checkpoints)]
    assert peers.span == slice(7, 7 + sum(splits))


def test_kimi_linear_moves_its_published_92_units():
    placement = place(KIMI_LINEAR, kimi_linear_mask(), 2, "storage")
    first, second = Routes.of(placement, 0), Routes.of(placement, 1)
    assert (first.kept, first.sent, first.received.count) == (14_695, PeerUnits(14_695, (0, 92)), 0)
    assert (second.kept, second.received, second.sent.count) == (14_602, PeerUnits(14_602, (92, 0)), 0)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_is_none_is_refused(rank):
    placement = place(gdn(), seeded_mask(gdn(), 0), 2, "storage")
    with pytest.raises(ValueError, match=rf"rank must be in \[0, 2\), got {rank}"):
        Routes.of(placement, rank)


@pytest.mark.parametrize("column", [1, 2])
def test_moves_in_another_order_are_refused(column):
    geometry = kda(heads=4, k_dim=8)
    mask = torch.zeros(2, 32, dtype=torch.bool)
    mask[:, :8] = True  # rank 0 of 4 computes all
    placement = place(geometry, mask, 4, "storage")
    moves = placement.moves.clone()
    moves[:, column] = moves[:, column].flip(0)
    with pytest.raises(ValueError, match="moves must take units 4 to 16 one after another, peers ascending"):
        Routes.of(dataclasses.replace(placement, moves=moves), 0)


@pytest.mark.parametrize(
    ("geometry", "dtypes", "expected"),
    [
        (kda(v_dim=128), DtypePolicy(), 512),
        (kda(v_dim=128), DtypePolicy(quantized="int8"), 132),
        (gdn(v_dim=3, k_dim=5), DtypePolicy(temporal=torch.bfloat16), 30),
        (gdn(v_dim=3, k_dim=5), DtypePolicy(quantized="int8"), 35),
        (gdn(v_dim=6, k_dim=5), DtypePolicy(quantized="int4"), 35),
        (kda(v_dim=128), DtypePolicy(torch.bfloat16, quantized="int4"), 66),
    ],
)
def test_a_unit_travels_with_its_scales(geometry, dtypes, expected):
    assert row_bytes(RaggedLayout.from_mask(geometry, seeded_mask(geometry, 0), dtypes)) == expected


def test_off_moves_nothing():
    placement: Placement = place(gdn(), seeded_mask(gdn(), 1), 2)
    for rank in range(2):
        routes = Routes.of(placement, rank)
        assert (routes.kept, routes.sent.count, routes.received.count) == (placement.local_units[rank], 0, 0)
