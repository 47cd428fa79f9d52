from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dasc.accounting import (
    bottleneck_compression,
    checkpoint_compression,
    quantized_only_compression,
    split_budget,
    temporal_compression,
    usable_slots,
)
from dasc.geometry import DtypePolicy, StateGeometry
from dasc.layout import rank_layouts

INT8 = DtypePolicy(quantized="int8")
INT4 = DtypePolicy(quantized="int4")

# 2 layers x 4 heads x 3 x 5: temporal 480 bytes; convolution 2 layers x (10 + 10 + 12) channels x 2 rows: 256 bytes
GDN = StateGeometry("toy", "gdn", 2, (0, 1), 4, 2, head_v_dim=3, head_k_dim=5, conv_width=3)
KDA = replace(GDN, kind="kda")


def gdn_mask() -> torch.Tensor:
    """One head kept in layer 0 (on rank 0 of 2), three in layer 1 (two on rank 0)."""
    return torch.tensor([[1, 0, 0, 0], [1, 1, 1, 0]], dtype=torch.bool)


def kda_mask() -> torch.Tensor:
    mask = torch.zeros(2, 20, dtype=torch.bool)
    mask[0, :6] = mask[1, 4:14] = True
    return mask


@st.composite
def masked_geometries(draw):
    K = draw(st.integers(1, 4))
    geometry = StateGeometry(
        "toy",
        draw(st.sampled_from(["gdn", "kda"])),
        3,
        (0, 1, 2),
        4,
        2,
        head_v_dim=draw(st.integers(1, 4)),
        head_k_dim=K,
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    density = draw(st.sampled_from([0.0, 0.2, 0.7, 1.0]))
    return geometry, torch.rand(3, geometry.units_per_layer, generator=generator) < density


# compression ratios (eq. 6)


def test_ratios_by_hand_for_gdn():
    ragged, padded = (rank_layouts(GDN, gdn_mask(), kind=kind) for kind in ("ragged", "padded"))
    # 4 of 8 heads of 60 bytes, or 2 layers x 3 of them
    assert temporal_compression(GDN, ragged) == 480 / 240
    assert temporal_compression(GDN, padded) == 480 / 360
    assert checkpoint_compression(GDN, ragged) == 736 / 496
    assert checkpoint_compression(GDN, padded) == 736 / 616


def test_ratios_by_hand_for_kda():
    ragged, padded = (rank_layouts(KDA, kda_mask(), kind=kind) for kind in ("ragged", "padded"))
    # 16 of 40 channels of 12 bytes, or 2 layers x 10 of them
    assert temporal_compression(KDA, ragged) == 480 / 192
    assert temporal_compression(KDA, padded) == 480 / 240
    assert checkpoint_compression(KDA, ragged) == 736 / 448


def test_ratios_by_hand_with_int8_and_its_scales():
    # a GDN head: 15 codes and 5 FP32 scales; a KDA channel: 3 codes and 1
    (gdn,), (kda,) = rank_layouts(GDN, gdn_mask(), dtypes=INT8), rank_layouts(KDA, kda_mask(), dtypes=INT8)
    assert (gdn.temporal_slot_bytes, gdn.scale_slot_bytes) == (60, 80)
    assert (kda.temporal_slot_bytes, kda.scale_slot_bytes) == (48, 64)
    assert temporal_compression(GDN, [gdn]) == 480 / 140
    assert temporal_compression(GDN, [gdn], scales=False) == 480 / 60
    assert checkpoint_compression(KDA, [kda]) == 736 / (48 + 64 + 256)


def test_fullest_rank_limits_all():
    layouts = rank_layouts(GDN, gdn_mask(), 2)
    # rank 0 keeps 3 heads, rank 1 keeps 1; each has 128 bytes of convolution rows
    assert [layout.slot_bytes for layout in layouts] == [180 + 128, 60 + 128]
    assert bottleneck_compression(layouts) == 368 / 308
    assert checkpoint_compression(GDN, layouts) == 736 / (308 + 188)
    assert temporal_compression(GDN.shard(2), layouts[:1]) == 240 / 180


def test_int8_of_every_unit_by_hand():
    for geometry in (GDN, KDA):
        # 120 codes and 40 FP32 scales in both
        assert quantized_only_compression(geometry, INT8, with_conv=False) == 480 / 280
        assert quantized_only_compression(geometry, INT8, with_conv=True) == 736 / 536


def test_nothing_stored_is_an_infinite_ratio():
    nothing = torch.zeros(2, 4, dtype=torch.bool)
    assert temporal_compression(GDN, rank_layouts(GDN, nothing)) == float("inf")
    assert checkpoint_compression(GDN, rank_layouts(GDN, nothing)) == 736 / 256
    rowless = replace(GDN, conv_width=1)
    assert checkpoint_compression(rowless, rank_layouts(rowless, nothing)) == float("inf")


@given(masked_geometries())
def test_layout_gain_is_the_fullest_layer_over_the_mean_layer(case):
    """Section 4.1: C_rag / C_pad = R_max / r_bar."""
    geometry, mask = case
    (ragged,), (padded,) = (rank_layouts(geometry, mask, kind=kind) for kind in ("ragged", "padded"))
    counts = mask.sum(dim=1).double()
    if counts.any():
        gain = temporal_compression(geometry, [ragged]) / temporal_compression(geometry, [padded])
        assert gain == pytest.approx((counts.max() / counts.mean()).item(), rel=1e-12)
        assert temporal_compression(geometry, [ragged]) == pytest.approx(mask.numel() / int(mask.sum()), rel=1e-12)


@given(masked_geometries(), st.sampled_from(["ragged", "padded"]), st.sampled_from([DtypePolicy(), INT8]))
def test_ratios_are_ordered(case, kind, dtypes):
    geometry, mask = case
    whole, ranks = (rank_layouts(geometry, mask, p, kind=kind, dtypes=dtypes) for p in (1, 2))
    # convolution rows are on both sides, so they draw the ratio towards 1, and no mask goes beyond them alone
    temporal, full = temporal_compression(geometry, whole), checkpoint_compression(geometry, whole)
    assert min(1.0, temporal) <= full <= max(1.0, temporal)
    assert full <= geometry.dense_bytes() / geometry.conv_bytes()
    # the bottleneck rank never does better than the average
    assert bottleneck_compression(ranks) <= checkpoint_compression(geometry, ranks) + 1e-12


def test_int4_of_every_unit_by_hand():
    for geometry in (replace(GDN, head_v_dim=4), replace(KDA, head_v_dim=4)):
        # 160 codes in 80 bytes and 40 FP32 scales; 2 layers x (10 + 10 + 16) channels x 2 rows of BF16
        assert quantized_only_compression(geometry, INT4, with_conv=False) == 640 / 240
        assert quantized_only_compression(geometry, INT4, with_conv=True) == (640 + 288) / (240 + 288)


@given(masked_geometries(), st.sampled_from([INT8, INT4]))
def test_a_full_mask_is_quantised_only(case, dtypes):
    geometry, mask = case
    geometry = replace(geometry, head_v_dim=2 * geometry.head_v_dim)
    everything = rank_layouts(geometry, torch.ones_like(mask), dtypes=dtypes)
    assert temporal_compression(geometry, everything) == quantized_only_compression(geometry, dtypes, with_conv=False)
    assert checkpoint_compression(geometry, everything) == quantized_only_compression(geometry, dtypes, with_conv=True)


def test_layouts_of_something_else_than_the_geometry_are_refused():
    layouts = rank_layouts(GDN, gdn_mask(), 2)
    for compression in (temporal_compression, checkpoint_compression):
        for wrong in ([], layouts[:1], layouts * 2):
            with pytest.raises(ValueError, match="layouts must cover the 8 units"):
                compression(GDN, wrong)
    with pytest.raises(ValueError, match="got none"):
        bottleneck_compression([])


# slots (appendix C.1)

sizes = st.integers(1, 10**6)


def test_slots_by_hand():
    assert usable_slots(1000, [90, 100]) == 9
    assert usable_slots(999, [90, 100]) == 8
    assert usable_slots(100, [100]) == 0
    assert usable_slots(0, [100]) == 0


@given(pool=st.integers(0, 10**9), slots=st.lists(sizes, min_size=1, max_size=4))
def test_slots_and_slot_0_fit_every_rank_and_one_more_does_not(pool, slots):
    """Fault 12: nothing is reserved but slot 0."""
    usable = usable_slots(pool, slots)
    if usable:
        assert all((usable + 1) * size <= pool for size in slots)
    assert (usable + 2) * max(slots) > pool


@given(pool=st.integers(0, 10**9), more=st.integers(0, 10**6), slots=st.lists(sizes, min_size=1, max_size=4))
def test_slots_never_fall_as_the_pool_grows(pool, more, slots):
    assert usable_slots(pool + more, slots) >= usable_slots(pool, slots)


@pytest.mark.parametrize(("pool", "slots"), [(-1, [1]), (10, []), (10, [5, 0]), (10, [-5])])
def test_wrong_pools_and_slots_are_refused(pool, slots):
    with pytest.raises(ValueError, match=r"pool_bytes must not|slot_bytes must be"):
        usable_slots(pool, slots)


# one budget for native, compressed and temporary memory (appendix C.1)


def test_dense_split_by_hand():
    split = split_budget(1000, dense_slot_bytes=150, tmp_bytes=60)
    assert (split.native_slots, split.native_bytes) == (5, 900)
    assert (split.compressed_slots, split.compressed_bytes) == (0, 0)
    assert (split.tmp_bytes, split.unused_bytes) == (60, 40)


def test_compressed_split_by_hand():
    split = split_budget(1000, dense_slot_bytes=150, compressed_slot_bytes=70, native_slots=2, tmp_bytes=60)
    # 3 x 150 native and 60 temporary leave 490: 7 slots, one of them reserved
    assert (split.native_slots, split.native_bytes) == (2, 450)
    assert (split.compressed_slots, split.compressed_bytes) == (6, 490)
    assert split.unused_bytes == 0


@st.composite
def budgets(draw):
    arguments = {"dense_slot_bytes": draw(sizes), "tmp_bytes": draw(st.integers(0, 10**6))}
    if draw(st.booleans()):
        arguments |= {"compressed_slot_bytes": draw(sizes), "native_slots": draw(st.integers(1, 50))}
    return arguments


def least_budget(arguments: dict[str, int]) -> int:
    """One usable slot in each pool, slot 0 of each beside it."""
    native = arguments.get("native_slots", 1) + 1
    return (
        arguments["tmp_bytes"] + native * arguments["dense_slot_bytes"] + 2 * arguments.get("compressed_slot_bytes", 0)
    )


@given(arguments=budgets(), spare=st.integers(0, 10**8))
def test_parts_add_up_to_the_budget_and_no_further_slot_fits(arguments, spare):
    budget = least_budget(arguments) + spare
    split = split_budget(budget, **arguments)
    parts = (split.native_bytes, split.compressed_bytes, split.tmp_bytes, split.unused_bytes)
    assert sum(parts) == budget == split.budget_bytes
    assert min(parts) >= 0
    assert split.native_bytes == (split.native_slots + 1) * arguments["dense_slot_bytes"]
    if "compressed_slot_bytes" in arguments:
        assert split.native_slots == arguments["native_slots"]
        assert split.compressed_bytes == (split.compressed_slots + 1) * arguments["compressed_slot_bytes"]
        assert split.compressed_slots >= 1
        assert split.unused_bytes < arguments["compressed_slot_bytes"]
    else:
        assert split.native_slots >= 1
        assert split.compressed_slots == split.compressed_bytes == 0
        assert split.unused_bytes < arguments["dense_slot_bytes"]


@given(arguments=budgets(), spare=st.integers(0, 10**7), more=st.integers(0, 10**6))
def test_slots_never_fall_as_the_budget_grows(arguments, spare, more):
    budget = least_budget(arguments) + spare
    small, large = split_budget(budget, **arguments), split_budget(budget + more, **arguments)
    assert large.native_slots >= small.native_slots
    assert large.compressed_slots >= small.compressed_slots


@given(budgets())
def test_budget_one_byte_short_of_a_slot_in_each_pool_is_refused_with_what_it_takes(arguments):
    needed = least_budget(arguments)
    with pytest.raises(ValueError, match=f"and what is temporary take {needed}"):
        split_budget(needed - 1, **arguments)


@pytest.mark.parametrize(
    ("budget", "arguments", "message"),
    [
        (-1, {"dense_slot_bytes": 10}, "must not be negative"),
        (100, {"dense_slot_bytes": 10, "tmp_bytes": -1}, "must not be negative"),
        (100, {"dense_slot_bytes": 0}, "dense_slot_bytes must be positive"),
        (100, {"dense_slot_bytes": 10, "native_slots": 2}, "native_slots is derived"),
        (100, {"dense_slot_bytes": 10, "compressed_slot_bytes": 5}, "a compressed pool needs"),
        (100, {"dense_slot_bytes": 10, "compressed_slot_bytes": 5, "native_slots": 0}, "a compressed pool needs"),
        (100, {"dense_slot_bytes": 10, "compressed_slot_bytes": 0, "native_slots": 2}, "a compressed pool needs"),
    ],
)
def test_wrong_budgets_are_refused(budget, arguments, message):
    with pytest.raises(ValueError, match=message):
        split_budget(budget, **arguments)
