"""From pool to pool on the CPU path: every bit of every pool as the reference leaves it."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dasc import fast, reference
from tests.reference.test_packing import QUANTIZED, packing_cases
from tests.reference.test_slots import KDA
from tests.slot_pools import poisoned_pools, same_pools


@given(packing_cases(), st.booleans(), st.sampled_from(["zero", "leave"]))
def test_slots_are_the_references_bit_for_bit(case, strided, omitted):
    state, conv, layout = case.build()
    mine = poisoned_pools(state, conv, layout, case.seed, strided=strided)
    theirs = mine.clone()
    for module, pools in ((fast, mine), (reference, theirs)):
        module.pack_slots(pools.native, pools.native_slots, pools.store, pools.store_slots, layout)
    assert same_pools(mine, theirs)
    for module, pools in ((fast, mine), (reference, theirs)):
        pools.native.temporal[:, pools.native_slots] = 7
        module.unpack_slots(pools.store, pools.store_slots, pools.native, pools.native_slots, layout, omitted=omitted)
    assert same_pools(mine, theirs)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@QUANTIZED
def test_what_has_no_codes_is_stored_as_the_reference_does(dtypes, kind):
    state, conv, layout = replace(KDA, kind=kind, V=4, dtypes=dtypes, density=(1.0, 1.0)).build()
    state[1, 0, 1, 2, 3] = torch.inf
    state[0, 1, 0, 0, 0] = torch.nan
    mine = poisoned_pools(state, conv, layout, 0)
    theirs = mine.clone()
    for module, pools in ((fast, mine), (reference, theirs)):
        module.pack_slots(pools.native, pools.native_slots, pools.store, pools.store_slots, layout)
    assert torch.equal(mine.store.scales.isnan(), theirs.store.scales.isnan())
    assert torch.equal(mine.store.temporal, theirs.store.temporal)
