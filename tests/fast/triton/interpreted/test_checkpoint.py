"""Checkpoint kernels, interpreted: every bit of every pool as the reference leaves it.

Codes with BF16 scales are left to a GPU: interpreted, Triton rounds FP32 to BF16 wrongly.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dasc import reference
from dasc.contract import PackedState
from dasc.fast.triton import checkpoint, checkpoint_launch
from dasc.geometry import DtypePolicy
from dasc.layout import RaggedLayout
from tests.masks import KIMI_LINEAR, kimi_linear_mask
from tests.reference.test_packing import (
    FP32,
    INT4,
    INT8,
    KDA,
    QUANTIZED,
    PackingCase,
    packed_equal,
    packing_cases,
    state_mask,
)
from tests.slot_pools import Pools, poisoned_pools, same_bits, same_pools

FEW = settings(max_examples=12)
OMITTED = ("zero", "leave")
# heads of several tiles along V and K, the last of them not full
LARGE = PackingCase("kda", 2, 2, 1, 2, 37, 19, 4, (0.3, 0.05), FP32, "ragged", 3, False, seed=3)


def interpretable(case: PackingCase) -> PackingCase:
    if case.dtypes.quantized and case.dtypes.temporal == torch.bfloat16:
        return replace(case, dtypes=replace(case.dtypes, temporal=torch.float16))
    return case


def assert_pools_as_the_references(case: PackingCase, strided: bool) -> None:
    """Store, then both loads into slots that hold something else."""
    state, conv, layout = case.build()
    mine = poisoned_pools(state, conv, layout, case.seed, strided=strided)
    theirs = mine.clone()
    store(mine, theirs, layout)
    assert same_pools(mine, theirs)
    for omitted in OMITTED:
        for module, pools in ((checkpoint, mine), (reference, theirs)):
            pools.native.temporal[:, pools.native_slots] = 7
            pools.native.conv[:, pools.native_slots] = 7
            module.unpack_slots(
                pools.store, pools.store_slots, pools.native, pools.native_slots, layout, omitted=omitted
            )
        assert same_pools(mine, theirs)


def store(mine: Pools, theirs: Pools, layout) -> None:
    for module, pools in ((checkpoint, mine), (reference, theirs)):
        module.pack_slots(pools.native, pools.native_slots, pools.store, pools.store_slots, layout)


@FEW
@given(packing_cases().map(interpretable), st.booleans())
def test_slots_are_the_references_bit_for_bit(case, strided):
    """Faults 13, 24, 25, 26: every layout and dtype, strided or not; what is not addressed keeps its bits."""
    assert_pools_as_the_references(case, strided)


@pytest.mark.parametrize(("V", "strided"), [(18, False), (150, True)])
@pytest.mark.parametrize("scheme", ["ragged", "padded"])
@pytest.mark.parametrize(
    "dtypes", [FP32, INT8, DtypePolicy(torch.bfloat16), DtypePolicy(torch.float64, quantized="int4")]
)
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_heads_of_many_tiles_are_the_references_bit_for_bit(kind, dtypes, scheme, V, strided):
    K = 150 if kind == "gdn" and V == 150 else 37
    density = (0.7, 0.3) if kind == "gdn" else (0.3, 0.05)
    case = replace(LARGE, kind=kind, dtypes=dtypes, scheme=scheme, V=V, K=K, N=1, density=density)
    assert_pools_as_the_references(case, strided)


@FEW
@given(packing_cases().map(interpretable), st.booleans())
def test_pack_and_unpack_equal_the_reference_bit_for_bit(case, with_base):
    state, conv, layout = case.build()
    got, packed = checkpoint.pack(state, conv, layout), reference.pack(state, conv, layout)
    assert packed_equal(got, packed)
    assert got.temporal.is_contiguous()
    base = torch.flip(state, dims=(0, 2)) + 1 if with_base else None
    dense, expected = checkpoint.unpack(packed, layout, base), reference.unpack(packed, layout, base)
    assert all(same_bits(a, b) for a, b in zip(dense, expected, strict=True))
    assert dense.temporal.is_contiguous()


@pytest.mark.parametrize("dtypes", [FP32, INT8, INT4], ids=["fp32", "int8", "int4"])
def test_the_published_mask_of_one_rank_of_eight(dtypes):
    """Kimi-Linear, W_max = 16, its first two layers, heads of 128 by 128 as the kernels are laid out for."""
    geometry = replace(KIMI_LINEAR, num_blocks=2, recurrent_layers=(0, 1)).shard(8)
    mask = kimi_linear_mask().view(20, 8, -1)[:2, 3]
    layout = RaggedLayout.from_mask(geometry, mask, dtypes)
    gen = torch.Generator().manual_seed(0)
    state = torch.randn(2, 1, *geometry.state_shape[1:], generator=gen)
    conv = torch.randn(2, 1, *geometry.conv_shape[1:], generator=gen).bfloat16()
    mine = poisoned_pools(state, conv, layout, 0)
    theirs = mine.clone()
    store(mine, theirs, layout)
    assert same_pools(mine, theirs)
    mine.native.temporal.fill_(7)
    checkpoint.unpack_slots(mine.store, mine.store_slots, mine.native, mine.native_slots, layout)
    expected = reference.unpack(reference.pack(state, conv, layout), layout)
    assert same_bits(mine.native.temporal[:, mine.native_slots], expected.temporal)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_every_bit_pattern_survives_an_exact_copy(kind):
    """NaN with a payload, subnormals, both zeros, in state and convolution rows."""
    case = replace(KDA, kind=kind, N=1, dtypes=DtypePolicy(torch.bfloat16), density=(1.0, 1.0))
    state, conv, layout = case.build()
    bits = torch.randint(-(2**15), 2**15, (2, max(state.numel(), conv.numel())), generator=torch.manual_seed(0))
    state, conv = (
        row[: x.numel()].to(torch.int16).view(torch.bfloat16).view(x.shape)
        for row, x in zip(bits, (state, conv), strict=True)
    )
    restored = checkpoint.unpack(checkpoint.pack(state, conv, layout), layout)
    assert same_bits(restored.temporal, state)
    assert same_bits(restored.conv, conv)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("native_rows_first", [False, True])
@pytest.mark.parametrize("store_rows_first", [False, True])
def test_convolution_rows_are_copied_whatever_their_order_in_memory(width, native_rows_first, store_rows_first):
    """SGLang holds them as [channels, width - 1] for GDN and as [width - 1, channels] for KDA."""
    state, conv, layout = replace(KDA, H=1, K=512, V=3, width=width, density=(0.0, 0.0)).build()
    pools = poisoned_pools(state, conv, layout, 0, strided=native_rows_first)
    if store_rows_first:
        pools = pools._replace(store=pools.store._replace(conv=pools.store.conv.mT.contiguous().mT))
    checkpoint.pack_slots(pools.native, pools.native_slots, pools.store, pools.store_slots, layout)
    assert same_bits(pools.store.conv[:, pools.store_slots], conv)
    assert pools.store.conv.isnan().sum() == 3 * 2 * layout.geometry.conv_channels * (width - 1)
    pools.native.conv.fill_(7)
    checkpoint.unpack_slots(pools.store, pools.store_slots, pools.native, pools.native_slots, layout, omitted="leave")
    assert same_bits(pools.native.conv[:, pools.native_slots], conv)


@pytest.mark.parametrize(("dtypes", "V", "largest"), [(INT8, 64, -127), (INT4, 12, -7)], ids=["int8", "int4"])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_halves_are_rounded_to_even_as_the_reference_does(kind, dtypes, V, largest):
    """Scale 1: the largest code is used, and all other values lie half-way between two integers."""
    state, conv, layout = replace(KDA, kind=kind, dtypes=dtypes, V=V, density=(1.0, 1.0)).build()
    state[:] = torch.arange(-V // 2, V // 2)[:, None] + 0.5
    state[..., 5, :] = largest
    packed = checkpoint.pack(state, conv, layout)
    assert packed_equal(packed, reference.pack(state, conv, layout))
    assert (packed.scales == 1).all()
    loaded = checkpoint.unpack(packed, layout).temporal
    assert set(loaded.flatten().tolist()) == {*range(-V // 2, V // 2 + 1, 2), largest}


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_every_byte_of_int4_loads_as_the_references(kind):
    """-8 too, which nothing stores."""
    state, conv, layout = replace(KDA, kind=kind, L=1, N=1, H=1, K=2, V=256, dtypes=INT4, density=(1.0,)).build()
    packed = reference.pack(state, conv, layout)
    packed = packed._replace(temporal=torch.arange(256, dtype=torch.uint8).view(packed.temporal.shape))
    loaded, expected = checkpoint.unpack(packed, layout), reference.unpack(packed, layout)
    assert same_bits(loaded.temporal, expected.temporal)
    assert len(loaded.temporal.unique()) == 31  # 16 codes of two scales, 0 in both


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("factor", [0.0, 1e-12, 3e-8, 1e30, 3e38])
@QUANTIZED
def test_codes_of_small_and_large_units_are_the_references(dtypes, factor, kind):
    """Eq. 8 keeps scales from zero; the largest FP32 numbers do not overflow."""
    state, conv, layout = replace(KDA, kind=kind, V=4, dtypes=dtypes).build()
    state = state.clamp(-1, 1) * factor
    assert packed_equal(checkpoint.pack(state, conv, layout), reference.pack(state, conv, layout))


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")  # NumPy's, of infinity by infinity
@pytest.mark.parametrize("kind", ["gdn", "kda"])
@QUANTIZED
def test_what_has_no_codes_loads_as_nan_and_hides_in_no_neighbour(dtypes, kind):
    state, conv, layout = replace(KDA, kind=kind, V=4, dtypes=dtypes, density=(1.0, 1.0)).build()
    state[1, 0, 1, 2, 3] = -torch.inf
    state[0, 1, 0, 0, 0] = torch.nan
    mine = poisoned_pools(state, conv, layout, 0)
    theirs = mine.clone()
    store(mine, theirs, layout)
    assert torch.equal(mine.store.temporal, theirs.store.temporal)
    assert torch.equal(mine.store.scales.nan_to_num(-1), theirs.store.scales.nan_to_num(-1))
    for module, pools in ((checkpoint, mine), (reference, theirs)):
        module.unpack_slots(pools.store, pools.store_slots, pools.native, pools.native_slots, layout)
    assert torch.equal(mine.native.temporal.nan_to_num(-9), theirs.native.temporal.nan_to_num(-9))
    loaded = mine.native.temporal[:, mine.native_slots]
    assert loaded[1, 0, 1, :, 3].isnan().all()
    assert loaded.isnan().sum() == 2 * state.shape[3]
    with pytest.raises(ValueError, match="finite"):
        checkpoint.pack(state, conv, layout)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@QUANTIZED
def test_omitted_units_are_not_quantised(dtypes, kind):
    state, conv, layout = replace(KDA, kind=kind, V=4, dtypes=dtypes, density=(0.4, 0.4)).build()
    poisoned = torch.where(state_mask(layout), state, torch.nan)
    assert packed_equal(checkpoint.pack(poisoned, conv, layout), reference.pack(state, conv, layout))


def test_only_sectors_with_a_retained_channel_are_read():
    """With 1 of 64 channels retained, one tile of 32 and in it one sector of 8."""
    state, conv, layout = replace(KDA, K=64, V=4, N=1, H=1, density=(0.0, 0.0)).build()
    mask = layout.mask.clone()
    mask[:, 40] = True
    layout = RaggedLayout.from_mask(layout.geometry, mask)
    tables = checkpoint.tile_tables(layout, state.device)
    assert tables.stored.place.tolist() == [[layer, 0, 0, 1] for layer in (0, 1)]
    assert tables.stored.sectors.tolist() == [[0, 1, 0, 0]] * 2
    packed = checkpoint.pack(state, conv, layout)
    assert torch.equal(packed.temporal, state[:, 0, 0, :, 40][None])


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_a_call_is_one_launch_on_a_flat_grid(kind, monkeypatch):
    """Fault 35: 70,000 checkpoints do not exceed a grid axis, as only the first one is used."""
    grids = []

    class Counting:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda **arguments: None

    monkeypatch.setattr(checkpoint_launch, "pack_kernel", Counting())
    monkeypatch.setattr(checkpoint_launch, "unpack_kernel", Counting())
    state, conv, layout = replace(KDA, kind=kind).build()
    pools = poisoned_pools(state, conv, layout, 0)
    for n in (2, 1):
        native_slots, store_slots = pools.native_slots[:n], pools.store_slots[:n]
        checkpoint.pack_slots(pools.native, native_slots, pools.store, store_slots, layout)
        checkpoint.unpack_slots(pools.store, store_slots, pools.native, native_slots, layout)
    assert [len(grid) for grid in grids] == [1] * 4
    assert grids[0][0] == 2 * grids[2][0]
    assert grids[1][0] == 2 * grids[3][0]


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_offsets_beyond_32_bits_are_reached(kind):
    """Slot 3 of a store whose slots lie 2 ** 30 bytes apart; memory between them is never touched."""
    state, conv, layout = replace(KDA, kind=kind, dtypes=INT8, N=1).build()
    pools = poisoned_pools(state, conv, layout, 0)
    slots = torch.empty(3 * 2**30 + 2**20, dtype=torch.int8)
    temporal = slots.as_strided((4, *layout.slot_shape), (2**30, *pools.store.temporal.stride()[1:]))
    far = PackedState(temporal, pools.store.conv, pools.store.scales)
    index = torch.tensor([3])
    checkpoint.pack_slots(pools.native, pools.native_slots, far, index, layout)
    expected = reference.pack(state, conv, layout)
    assert torch.equal(far.temporal[3], expected.temporal[0])
    pools.native.temporal.fill_(7)
    checkpoint.unpack_slots(far, index, pools.native, pools.native_slots, layout)
    assert torch.equal(pools.native.temporal[:, pools.native_slots], reference.unpack(expected, layout).temporal)


def test_wrong_arguments_are_refused():
    """The contract's own tests have every case; this one shows that it is asked."""
    state, conv, layout = KDA.build()
    pools = poisoned_pools(state, conv, layout, 0)
    with pytest.raises(ValueError, match="state must"):
        checkpoint.pack(state.double(), conv, layout)
    with pytest.raises(ValueError, match="base must"):
        checkpoint.unpack(reference.pack(state, conv, layout), layout, base=state[:, :1])
    with pytest.raises(ValueError, match="store_slots must"):
        checkpoint.pack_slots(pools.native, pools.native_slots, pools.store, pools.store_slots + 9, layout)
    with pytest.raises(ValueError, match="native_slots must"):
        checkpoint.unpack_slots(pools.store, pools.store_slots, pools.native, pools.native_slots + 9, layout)
    with pytest.raises(ValueError, match="omitted must"):
        checkpoint.unpack_slots(
            pools.store, pools.store_slots, pools.native, pools.native_slots, layout, omitted="base"
        )
