"""Partition kernels, interpreted: every bit of pools and rows as the CPU form leaves it (appendix B.1)."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dasc.fast.distributed import partition as cpu
from dasc.fast.distributed.routes import Routes, row_bytes
from dasc.fast.triton import partition
from dasc.geometry import DtypePolicy
from dasc.layout import rank_layouts
from dasc.placement import Placement
from dasc.reference.placement import place
from tests.reference.test_packing import FP32, INT4, INT8, PackingCase, packing_cases
from tests.slot_pools import Pools, poisoned_pools, same_bits, same_pools

FEW = settings(max_examples=8)
POLICIES = [FP32, INT8, DtypePolicy(torch.bfloat16), DtypePolicy(torch.float16, quantized="int8"), INT4]


def uneven(kind: str, dtypes: DtypePolicy = FP32) -> PackingCase:
    return PackingCase(kind, 4, 2, 4, 2, 6, 8, 2, (0.3, 1.0, 1.0, 1.0), dtypes, "ragged", 0, False, seed=4)


def placed(case: PackingCase, ranks: int) -> tuple[Placement, list]:
    """The whole model's mask is the case's, but all ranks except the last keep few units, so that units move."""
    geometry, layout = case.geometry, case.build()[2]
    mask = layout.mask.clone()
    sparse = geometry.units_per_layer // ranks * (ranks - 1)
    mask[1:, :sparse] = False
    placement = place(geometry, mask, ranks, "storage")
    return placement, rank_layouts(geometry, mask, ranks, placement=placement, dtypes=case.dtypes)


def rank_pools(case: PackingCase, layout, strided: bool) -> Pools:
    own = replace(case, H=layout.geometry.num_key_heads)
    state, conv, _ = own.build()
    return poisoned_pools(state, conv, layout, case.seed, strided=strided)


def rows_of(layout, routes: Routes, checkpoints: int) -> torch.Tensor:
    return torch.full((checkpoints * routes.sent.count, row_bytes(layout)), 99, dtype=torch.uint8)


def assert_as_the_cpu_form(case: PackingCase, ranks: int, strided: bool) -> None:
    """Store and both loads of each rank; the rows come back as they went."""
    placement, layouts = placed(case, ranks)
    for rank, layout in enumerate(layouts):
        routes = Routes.of(placement, rank)
        mine = rank_pools(case, layout, strided)
        theirs = mine.clone()
        my_rows, their_rows = (rows_of(layout, routes, case.N) for _ in range(2))
        for module, pools, rows in ((partition, mine, my_rows), (cpu, theirs, their_rows)):
            module.pack_partition(
                pools.native, pools.native_slots, pools.store, pools.store_slots, rows, layout, routes
            )
        assert same_pools(mine, theirs)
        assert torch.equal(my_rows, their_rows)
        for omitted in ("zero", "leave"):
            for module, pools, rows in ((partition, mine, my_rows), (cpu, theirs, their_rows)):
                pools.native.temporal[:, pools.native_slots] = 7
                pools.native.conv[:, pools.native_slots] = 7
                module.unpack_partition(
                    pools.store,
                    pools.store_slots,
                    rows,
                    pools.native,
                    pools.native_slots,
                    layout,
                    routes,
                    omitted=omitted,
                )
            assert same_pools(mine, theirs)


@pytest.mark.parametrize("dtypes", POLICIES, ids=["fp32", "int8", "bf16", "fp16_int8", "int4"])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_units_go_to_their_slots_and_to_rows_by_destination_checkpoint_and_unit(kind, dtypes):
    case = uneven(kind, dtypes)
    placement, _ = placed(case, 4)
    peers = [sum(size > 0 for size in Routes.of(placement, rank).sent.splits) for rank in range(4)]
    assert max(peers) >= 2
    assert_as_the_cpu_form(case, 4, strided=not dtypes.quantized)


@FEW
@given(st.data(), st.sampled_from(POLICIES), st.booleans())
def test_any_mask_and_number_of_ranks(data, dtypes, strided):
    case = data.draw(packing_cases(scheme="ragged", V=8, dtypes=dtypes, spare=0))
    assert_as_the_cpu_form(case, data.draw(st.integers(1, case.H)), strided)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_what_is_loaded_is_what_was_stored(kind):
    placement, layouts = placed(uneven(kind), 4)
    for rank, layout in enumerate(layouts):
        routes = Routes.of(placement, rank)
        pools = rank_pools(uneven(kind), layout, False)
        before = pools.native.temporal.clone()
        rows = rows_of(layout, routes, 2)
        partition.pack_partition(pools.native, pools.native_slots, pools.store, pools.store_slots, rows, layout, routes)
        pools.native.temporal.fill_(7)
        partition.unpack_partition(
            pools.store, pools.store_slots, rows, pools.native, pools.native_slots, layout, routes, omitted="zero"
        )
        g = layout.geometry
        kept = layout.mask.view(g.num_layers, 1, g.num_value_heads, 1, g.units_per_head)
        expected = torch.where(kept, before[:, pools.native_slots], 0.0)
        assert same_bits(pools.native.temporal[:, pools.native_slots], expected)


@pytest.mark.parametrize(("dtypes", "V"), [(INT8, 3), (INT4, 6)])
def test_rows_with_unaligned_scales_are_refused(dtypes, V):
    case = replace(uneven("kda", dtypes), V=V)
    placement, layouts = placed(case, 4)
    rank = next(rank for rank in range(4) if Routes.of(placement, rank).sent.count)
    routes, layout = Routes.of(placement, rank), layouts[rank]
    pools, rows = rank_pools(case, layout, False), rows_of(layouts[rank], routes, 2)
    with pytest.raises(ValueError, match="multiple of 4 bytes"):
        partition.pack_partition(pools.native, pools.native_slots, pools.store, pools.store_slots, rows, layout, routes)
