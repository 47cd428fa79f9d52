"""The compressed pool over SGLang's own pool of states, in the place of SGLang's INT8 pool."""

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.configs.mamba_utils import (
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2CacheParams,
    Mamba2StateDType,
    Mamba2StateShape,
)
from sglang.srt.mem_cache.mamba_checkpoint_pool import MambaCheckpointPool
from sglang.srt.mem_cache.memory_pool import MambaPool

from dasc import reference
from dasc.cache.counters import Counters
from dasc.geometry import DtypePolicy, StateGeometry
from dasc.layout import Layout, PaddedLayout, RaggedLayout
from dasc.sglang.pool import CompressedPool, native_state
from dasc.sglang.served import ServedState
from tests.masks import seeded_mask
from tests.slot_pools import same_bits

SIZE = 6
LAYERS = (0, 1, 3)
GDN = StateGeometry("qwen3_next", "gdn", 4, LAYERS, 4, 2, 4, 5)
KDA = StateGeometry("kimi_linear", "kda", 4, LAYERS, 2, 2, 4, 4)


def cache_params(geometry: StateGeometry, dtypes: DtypePolicy) -> Mamba2CacheParams | KimiLinearCacheParams:
    """As SGLang's own model configurations make them."""
    dtype = Mamba2StateDType(conv=dtypes.conv, temporal=dtypes.temporal)
    if geometry.kind == "kda":
        shape = KimiLinearStateShape.create(
            tp_world_size=1, num_heads=geometry.num_value_heads, head_dim=geometry.head_v_dim
        )
        return KimiLinearCacheParams(shape=shape, layers=list(LAYERS), dtype=dtype)
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=geometry.num_value_heads * geometry.head_v_dim,
        n_groups=geometry.num_key_heads,
        num_heads=geometry.num_value_heads,
        head_dim=geometry.head_v_dim,
        state_size=geometry.head_k_dim,
        conv_kernel=geometry.conv_width,
    )
    return Mamba2CacheParams(shape=shape, layers=list(LAYERS), dtype=dtype)


def states(geometry: StateGeometry, dtypes: DtypePolicy, seed: int) -> MambaPool:
    """SGLang's pool of active states, every value drawn."""
    pool = MambaPool(
        size=SIZE,
        spec_state_size=0,
        cache_params=cache_params(geometry, dtypes),
        mamba_layer_ids=list(LAYERS),
        device="cpu",
        enable_memory_saver=False,
    )
    gen = torch.Generator().manual_seed(seed)
    for part in (pool.mamba_cache.temporal, *pool.mamba_cache.conv):
        part.copy_(torch.randn(part.shape, generator=gen))
    return pool


def compressed(layout: Layout, slots: int = SIZE) -> CompressedPool:
    return CompressedPool(layout, slots, "cpu", Counters())


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    geometry = draw(st.sampled_from([GDN, KDA]))
    temporal, conv = draw(st.sampled_from([(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]))
    dtypes = DtypePolicy(temporal, conv, draw(st.sampled_from([None, "int8", "int4"])))
    mask = seeded_mask(geometry, draw(st.integers(0, 99)), draw(st.sampled_from([0.0, 0.5, 1.0])))
    return draw(st.sampled_from([RaggedLayout, PaddedLayout])).from_mask(geometry, mask, dtypes)


@given(layouts(), st.integers(0, 2**31 - 1), st.integers(1, SIZE))
def test_a_load_gives_what_the_reference_makes_of_the_stored_states_and_touches_no_other_slot(
    layout: Layout, seed: int, count: int
):
    """Faults 13, 24 and 25: every part in its own dtype, and d_k != d_v."""
    gen = torch.Generator().manual_seed(seed)
    active = states(layout.geometry, layout.dtypes, seed)
    stored = native_state(active)
    sources, targets = (torch.randperm(SIZE, generator=gen)[:count] + 1 for _ in range(2))
    pool = compressed(layout)
    slots = pool.alloc(count)
    assert slots is not None
    pool.store_from_active(active, sources, slots)
    packed = reference.pack(stored.temporal[:, sources], stored.conv[:, sources], layout)
    expected = reference.unpack(packed, layout)

    other = states(layout.geometry, layout.dtypes, seed + 1)
    before = [part.clone() for part in native_state(other)]
    order = torch.randperm(count, generator=gen)
    pool.load_to_active(other, slots[order], targets)
    for found, untouched, wanted in zip(native_state(other), before, expected):
        assert same_bits(found[:, targets], wanted[:, order])
        rest = torch.ones(SIZE + 1, dtype=torch.bool).index_fill(0, targets, False)
        assert same_bits(found[:, rest], untouched[:, rest])
    assert pool.counters.hits["compressed"] == count


@pytest.mark.parametrize("geometry", [GDN, KDA])
def test_the_state_is_read_where_sglang_keeps_it_and_never_copied(geometry: StateGeometry):
    active = states(geometry, DtypePolicy(), 0)
    state = native_state(active)
    assert tuple(state.temporal.shape) == (len(LAYERS), SIZE + 1, *geometry.state_shape[1:])
    assert tuple(state.conv.shape) == (len(LAYERS), SIZE + 1, *geometry.conv_shape[1:])
    state.temporal[2, 3, 1, 2, 0] = 7.0
    state.conv[1, 4, 5, 2] = 8.0
    assert active.mamba_cache.temporal[2, 3, 1, 2, 0] == 7.0
    [conv] = active.mamba_cache.conv
    assert conv[1, 4, 2, 5] == 8.0 if geometry.kind == "kda" else conv[1, 4, 5, 2] == 8.0


@pytest.mark.parametrize("geometry", [GDN, KDA])
def test_what_sglang_says_of_its_state_is_what_its_pool_has(geometry: StateGeometry):
    params = cache_params(geometry, DtypePolicy())
    served = ServedState.of(params, LAYERS, 1)
    active = states(geometry, DtypePolicy(), 0)
    assert served.kind == geometry.kind
    assert served.temporal == tuple(active.mamba_cache.temporal.shape[2:])
    assert served.conv == tuple(tuple(part.shape[2:]) for part in active.mamba_cache.conv)
    assert served.channels_last == (active.conv_slice_axis == 1)
    assert params.mamba_cache_per_req == geometry.dense_bytes()


def test_every_slot_is_handed_out_once_from_1_and_comes_back():
    """Fault 12."""
    pool = compressed(RaggedLayout.from_mask(GDN, seeded_mask(GDN, 0)))
    taken = [pool.alloc(1) for _ in range(SIZE)]
    assert [int(slot) for slot in taken if slot is not None] == list(range(1, SIZE + 1))
    assert all(slot is not None and slot.dtype == torch.int64 and slot.shape == (1,) for slot in taken)
    assert pool.alloc(1) is None
    assert pool.available_size() == 0
    pool.free(taken[3])
    assert pool.available_size() == 1
    assert torch.equal(pool.alloc(1), taken[3])
    pool.clear()
    assert pool.available_size() == pool.num_slots == SIZE


def test_a_slot_used_again_holds_nothing_of_before():
    """Fault 11: units that were kept and padding alike."""
    layout = PaddedLayout.from_mask(KDA, seeded_mask(KDA, 1))
    pool, other = compressed(layout, 1), compressed(layout, 1)
    first, second = states(KDA, layout.dtypes, 1), states(KDA, layout.dtypes, 2)
    for target, sources in ((pool, (first, second)), (other, (second,))):
        for source in sources:
            slot = target.alloc(1)
            assert slot is not None
            target.store_from_active(source, torch.tensor([1]), slot)
            target.free(slot)
    for found, wanted in zip(pool.store, other.store):
        assert same_bits(found, wanted)


def test_slots_take_the_bytes_that_the_layout_says():
    for quantized in (None, "int8", "int4"):
        for layout in (RaggedLayout, PaddedLayout):
            made = layout.from_mask(GDN, seeded_mask(GDN, 3), DtypePolicy(quantized=quantized))
            assert compressed(made, 9).mem_usage_bytes() == 10 * made.slot_bytes


def test_evictions_and_checkpoints_that_the_tree_had_are_counted_apart():
    pool = compressed(RaggedLayout.from_mask(GDN, seeded_mask(GDN, 0)))
    first, second = pool.alloc(1), pool.alloc(1)
    pool.free(first)
    pool.being_dropped = True
    pool.free(second)
    assert (pool.counters.evictions["compressed"], pool.counters.not_cached["duplicate"]) == (1, 1)


@pytest.mark.parametrize(
    "name", ["alloc", "free", "available_size", "clear", "store_from_active", "load_to_active", "mem_usage_bytes"]
)
def test_the_pool_is_called_as_sglang_calls_its_own(name: str):
    theirs, ours = (inspect.signature(getattr(kind, name)) for kind in (MambaCheckpointPool, CompressedPool))
    # SGLang passes all of them by position
    assert [p.default for p in ours.parameters.values()] == [p.default for p in theirs.parameters.values()]
