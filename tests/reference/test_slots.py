"""From pool to pool: packing of the addressed slots, and not a bit elsewhere."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dasc.contract import DenseState, PackedState
from dasc.layout import RaggedLayout
from dasc.reference.packing import pack, pack_slots, unpack, unpack_slots
from tests.reference.test_packing import FP32, QUANTIZED, PackingCase, packed_equal, packing_cases
from tests.slot_pools import poisoned_pools, same_bits, same_pools

KDA = PackingCase("kda", 2, 2, 2, 1, 5, 3, 4, (0.5, 0.7), FP32, "ragged", 2, False, 0)


def slots_of(store: PackedState, index: torch.Tensor, layout) -> PackedState:
    ragged = isinstance(layout, RaggedLayout)
    take = (lambda part: part[index]) if ragged else (lambda part: part[:, index])
    return PackedState(take(store.temporal), store.conv[:, index], None if store.scales is None else take(store.scales))


@given(packing_cases(), st.booleans())
def test_pack_slots_writes_what_pack_gives_and_nothing_else(case, strided):
    """Faults 9 and 13: every part of the addressed slots, poison elsewhere untouched."""
    state, conv, layout = case.build()
    pools = poisoned_pools(state, conv, layout, case.seed, strided=strided)
    before = pools.clone()
    pack_slots(pools.native, pools.native_slots, pools.store, pools.store_slots, layout)
    assert packed_equal(slots_of(pools.store, pools.store_slots, layout), pack(state, conv, layout))
    rest = torch.tensor([s for s in range(case.N + 3) if s not in pools.store_slots.tolist()])
    for now, then in zip(slots_of(pools.store, rest, layout), slots_of(before.store, rest, layout)):
        assert same_bits(now, then)
    assert same_pools(pools._replace(store=before.store), before)


@given(packing_cases(), st.booleans(), st.sampled_from(["zero", "leave"]))
def test_unpack_slots_writes_what_unpack_gives_and_nothing_else(case, strided, omitted):
    state, conv, layout = case.build()
    pools = poisoned_pools(state, conv, layout, case.seed, strided=strided)
    pack_slots(pools.native, pools.native_slots, pools.store, pools.store_slots, layout)
    refreshed = torch.flip(state, dims=(0, 2)) + 1
    pools.native.temporal[:, pools.native_slots] = refreshed
    pools.native.conv[:, pools.native_slots] = 0
    before = pools.clone()
    unpack_slots(pools.store, pools.store_slots, pools.native, pools.native_slots, layout, omitted=omitted)
    expected = unpack(pack(state, conv, layout), layout, refreshed if omitted == "leave" else None)
    assert torch.equal(pools.native.temporal[:, pools.native_slots], expected.temporal)
    assert torch.equal(pools.native.conv[:, pools.native_slots], expected.conv)
    before.native.temporal[:, pools.native_slots] = expected.temporal
    before.native.conv[:, pools.native_slots] = expected.conv
    assert same_pools(pools, before)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@QUANTIZED
def test_what_has_no_codes_loads_as_nan_and_hides_in_no_neighbour(dtypes, value, kind):
    state, conv, layout = replace(KDA, kind=kind, V=4, dtypes=dtypes, density=(1.0, 1.0)).build()
    state[1, 0, 1, 2, 3] = value
    pools = poisoned_pools(state, conv, layout, 0)
    pack_slots(pools.native, pools.native_slots, pools.store, pools.store_slots, layout)
    unpack_slots(pools.store, pools.store_slots, pools.native, pools.native_slots, layout)
    loaded = pools.native.temporal[:, pools.native_slots]
    expected = torch.zeros_like(loaded, dtype=torch.bool)
    expected[1, 0, 1, :, 3] = True  # the channel that shares its scale
    assert torch.equal(loaded.isnan(), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"store_slots": torch.tensor([1, 1])}, r"store_slots must be distinct and from 0 to 4, got \[1, 1\]"),
        ({"store_slots": torch.tensor([0, 5])}, "store_slots must be distinct and from 0 to 4"),
        ({"store_slots": torch.tensor([0])}, r"store_slots must be int32 or int64 \[2\]"),
        ({"native_slots": torch.tensor([0, 4])}, "native_slots must be from 0 to 3"),
        ({"native_slots": torch.tensor([0.0, 1.0])}, "native_slots must be int32 or int64"),
        ({"native": DenseState(torch.zeros(2, 4, 2, 3, 4), torch.zeros(2, 4, 26, 3))}, "native.temporal must be"),
        ({"native": DenseState(torch.zeros(4, 2, 3, 5), torch.zeros(2, 4, 26, 3))}, "native.temporal must be"),
        ({"layout": "narrow"}, "a storage-balanced slot is filled by the transfer"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    state, conv, layout = KDA.build()
    pools = poisoned_pools(state, conv, layout, 0)
    if change.get("layout") == "narrow":
        change = {"layout": RaggedLayout.from_mask(layout.geometry, layout.mask, layout.dtypes, slot_units=1)}
    arguments = {**pools._asdict(), "layout": layout, **change}
    before = pools.clone()
    with pytest.raises(ValueError, match=message):
        pack_slots(**arguments)
    assert same_pools(pools, before)


def test_omitted_units_are_zero_or_left():
    state, conv, layout = KDA.build()
    pools = poisoned_pools(state, conv, layout, 0)
    with pytest.raises(ValueError, match="omitted must be 'zero' or 'leave', got 'keep'"):
        unpack_slots(pools.store, pools.store_slots, pools.native, pools.native_slots, layout, omitted="keep")
