"""Packing on the CPU path is the reference's, bit for bit, and touches nothing but what it must."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dasc import fast, reference
from dasc.cache.storage import TensorStorage
from dasc.fast.cpu import packing
from dasc.fast.cpu.packing import load_units, store_units
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


def assert_same_packed(got, expected):
    assert packed_equal(got, expected)
    for a, b in zip(got, expected, strict=True):
        if a is not None:
            assert a.dtype == b.dtype
    assert got.temporal.is_contiguous()


def assert_same_dense(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
        assert a.dtype == b.dtype
    assert got.temporal.is_contiguous()


@given(packing_cases())
def test_pack_equals_the_reference_bit_for_bit(case):
    """Faults 13, 24, 25, 26: every layout, dtype and part, codes and their scales, strided or not."""
    state, conv, layout = case.build()
    assert_same_packed(fast.pack(state, conv, layout), reference.pack(state, conv, layout))


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("value", [0.0, 1e-12, 3e-8, 1e30])
@QUANTIZED
def test_the_scale_of_small_and_large_units_is_the_references(dtypes, value, kind):
    """Eq. 8 keeps scales from zero."""
    state, conv, layout = replace(KDA, kind=kind, V=4, dtypes=dtypes).build()
    assert_same_packed(fast.pack(state * value, conv, layout), reference.pack(state * value, conv, layout))


@given(packing_cases(), st.booleans(), st.sampled_from([1, 2, 64]))
def test_unpack_equals_the_reference_bit_for_bit(case, with_base, scatter_rows):
    state, conv, layout = case.build()
    packed = reference.pack(state, conv, layout)
    base = torch.flip(state, dims=(0, 2)) + 1 if with_base else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "SCATTER_ROWS", scatter_rows)
        assert_same_dense(fast.unpack(packed, layout, base), reference.unpack(packed, layout, base))


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_every_byte_of_int4_loads_as_the_references(kind):
    """-8 too, which nothing stores."""
    case = replace(KDA, kind=kind, L=1, N=1, H=1, K=2, V=256, dtypes=INT4, density=(1.0,))
    state, conv, layout = case.build()
    packed = reference.pack(state, conv, layout)
    every = torch.arange(256, dtype=torch.uint8).view(packed.temporal.shape)
    packed = packed._replace(temporal=every)
    loaded = fast.unpack(packed, layout)
    assert_same_dense(loaded, reference.unpack(packed, layout))
    codes = loaded.temporal / packed.scales.view(1, 1, 1, 1, 2)
    assert codes.round().unique().tolist() == list(range(-8, 8))


def test_pack_and_unpack_at_the_published_mask():
    """Kimi-Linear, W_max = 16: 29,389 of 81,920 units; the state moved is bit-identical."""
    for dtypes in (FP32, INT8, INT4):
        layout = RaggedLayout.from_mask(KIMI_LINEAR, kimi_linear_mask(), dtypes)
        gen = torch.Generator().manual_seed(0)
        state = torch.randn(20, 1, *KIMI_LINEAR.state_shape[1:], generator=gen)
        conv = torch.randn(20, 1, *KIMI_LINEAR.conv_shape[1:], generator=gen).bfloat16()
        packed = fast.pack(state, conv, layout)
        assert packed.temporal.nbytes == 29_389 * {None: 512, "int8": 128, "int4": 64}[dtypes.quantized]
        assert_same_packed(packed, reference.pack(state, conv, layout))
        assert_same_dense(fast.unpack(packed, layout), reference.unpack(packed, layout))


@given(packing_cases())
def test_omitted_units_and_padding_are_never_read(case):
    state, conv, layout = case.build()
    packed = fast.pack(torch.where(state_mask(layout), state, torch.nan), conv, layout)
    assert_same_packed(packed, reference.pack(state, conv, layout))
    filled = fast.pack(torch.ones_like(state), conv, layout).temporal != 0
    poisoned = packed._replace(temporal=packed.temporal.masked_fill(~filled, 99))
    assert_same_dense(fast.unpack(poisoned, layout), fast.unpack(packed, layout))


@given(packing_cases(N=3))
def test_slots_of_a_pool_are_read_in_place_and_memory_around_them_stays(case):
    """A native and a compressed pool, the middle slot of three; every other byte is poison before and after."""
    state, conv, layout = case.build()
    expected = reference.pack(state[:, 1:2], conv[:, 1:2], layout)
    for pool in (state, conv):
        pool[:, ::2] = torch.nan
    before = state.clone(), conv.clone()
    got = fast.pack(state[:, 1:2], conv[:, 1:2], layout)
    assert_same_packed(got, expected)
    restored = fast.unpack(got, layout, base=state[:, 1:2])
    assert_same_dense(restored, reference.unpack(expected, layout, base=state[:, 1:2]))
    for pool, copy in zip((state, conv), before, strict=True):
        assert torch.equal(pool.nan_to_num(77), copy.nan_to_num(77))


@given(packing_cases(N=3), st.sampled_from(["zero", "leave", "other"]))
def test_slots_and_states_in_any_strides_are_written_in_place(case, omitted):
    """K before V in memory, slots and states of every other layer, unit or channel; what lies between stays poison."""
    state, conv, layout = case.build()
    expected = reference.pack(state, conv, layout)

    def spaced(tensor):
        poison = torch.full((*tensor.shape, 2), 77, dtype=tensor.dtype)
        return poison[..., 0]

    temporal, scales = (None if part is None else spaced(part) for part in (expected.temporal, expected.scales))
    store_units(state.mT.contiguous().mT, layout, temporal, scales)
    assert packed_equal(expected._replace(temporal=temporal, scales=scales), expected)
    before, other = state + 1, spaced(state).copy_(state + 2)
    target = spaced(state.mT).mT.copy_(before)
    base = {"zero": None, "leave": target, "other": other}[omitted]
    load_units(temporal, scales, layout, target, base)
    whole = {"zero": None, "leave": before, "other": other}[omitted]
    assert torch.equal(target, reference.unpack(expected, layout, whole).temporal)
    for tensor in (temporal, target.mT, *([] if scales is None else [scales])):
        around = tensor.as_strided((*tensor.shape, 2), (*tensor.stride(), 1))
        assert (around[..., 1] == 77).all()


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@QUANTIZED
def test_in_slots_what_has_no_codes_loads_as_nan_and_its_neighbours_as_they_were(dtypes, value, kind):
    state, conv, layout = replace(KDA, kind=kind, V=4, dtypes=dtypes, density=(1.0, 1.0)).build()
    clean = fast.pack(state, conv, layout)
    state[1, 0, 1, 2, 3] = value
    temporal, scales = torch.full_like(clean.temporal, 77), torch.full_like(clean.scales, 77)
    store_units(state, layout, temporal, scales)
    broken = scales.isnan()
    assert int(broken.sum()) == 1
    assert ((temporal.mT if kind == "gdn" else temporal)[broken] == 0).all()
    assert torch.equal(scales[~broken], clean.scales[~broken])
    loaded, expected = torch.empty_like(state), fast.unpack(clean, layout).temporal
    load_units(temporal, scales, layout, loaded, None)
    assert loaded[1, 0, 1, :, 3].isnan().all()
    expected[1, 0, 1, :, 3] = torch.nan
    assert torch.equal(loaded.nan_to_num(77), expected.nan_to_num(77))


@given(packing_cases())
def test_no_argument_is_written_to_or_shared_with_a_result(case):
    state, conv, layout = case.build()
    base = state + 1
    packed = fast.pack(state, conv, layout)
    arguments = [state, conv, layout.mask, base, *(part for part in packed if part is not None)]
    before = [x.clone() for x in arguments]
    for result in (
        *fast.pack(state, conv, layout),
        *fast.unpack(packed, layout),
        *fast.unpack(packed, layout, base=base),
    ):
        if result is not None:
            result.fill_(7)
    assert all(torch.equal(x, y) for x, y in zip(arguments, before, strict=True))


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("dtypes", [FP32, INT8, INT4, DtypePolicy(temporal=torch.bfloat16)], ids=str)
def test_the_cache_may_pack_by_it(kind, dtypes):
    """Slot to slot through the cache's pools; slots beside them keep what they hold."""
    case = PackingCase(kind, 2, 1, 2, 2, 5, 4, 4, (0.4, 0.8), dtypes, "ragged", 0, False, seed=1)
    state, conv, layout = case.build()
    pools = [
        TensorStorage(case.geometry, 3, dtypes, layout=layout, compressed_slots=3, codec=codec)
        for codec in (fast, reference)
    ]
    for pool in pools:
        pool.temporal.fill_(5.0)
        pool.temporal[:, 2], pool.conv[:, 2] = state[:, 0], conv[:, 0]
        pool.pack(2, 1)
        pool.load(1, 3, position=0)
    assert torch.equal(pools[0].temporal, pools[1].temporal)
    assert torch.equal(pools[0].conv, pools[1].conv)


@QUANTIZED
def test_what_has_no_codes_is_refused_only_where_it_is_kept(dtypes):
    state, conv, layout = replace(KDA, V=4, dtypes=dtypes).build()
    kept = state_mask(layout).expand_as(state)
    for broken in (torch.inf, -torch.inf, torch.nan):
        poisoned = torch.where(kept, state, broken)
        fast.pack(poisoned, conv, layout)
        poisoned[tuple(kept.nonzero()[-1])] = broken
        with pytest.raises(ValueError, match="finite"):
            fast.pack(poisoned, conv, layout)


@pytest.mark.parametrize("case", [KDA, replace(KDA, scheme="padded"), replace(KDA, kind="gdn", V=4, dtypes=INT4)])
def test_wrong_arguments_are_refused(case):
    """The contract's own tests have every case; this one shows that it is asked."""
    state, conv, layout = case.build()
    packed = fast.pack(state, conv, layout)
    with pytest.raises(ValueError, match="state must"):
        fast.pack(state.double(), conv, layout)
    with pytest.raises(ValueError, match="conv must"):
        fast.pack(state, conv[:, :1], layout)
    with pytest.raises(ValueError, match=r"packed\.temporal must"):
        fast.unpack(packed._replace(temporal=packed.temporal[..., :-1]), layout)
    with pytest.raises(ValueError, match="base must"):
        fast.unpack(packed, layout, base=state[:, :1])
