"""State data in slots: every part comes back, nothing else is touched, and the bytes are those of the layout."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dasc.reference
from dasc.accounting import split_budget
from dasc.cache.storage import TensorStorage, scratch_bytes, staging_bytes
from dasc.geometry import DtypePolicy, Quantization, StateGeometry
from dasc.layout import rank_layouts

NAN = float("nan")


def geometry_of(kind: str) -> StateGeometry:
    """``d_k != d_v`` and two value heads a key head, where the kind allows it (fault 25)."""
    return StateGeometry("test", kind, 3, (0, 2), 4, 2 if kind == "gdn" else 4, head_v_dim=4, head_k_dim=5)


def storage_of(
    kind: str,
    share: float = 0.5,
    *,
    layout: str = "ragged",
    quantized: Quantization | None = None,
    native: int = 4,
    compressed: int = 3,
    temporal: torch.dtype = torch.float32,
    conv: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> TensorStorage:
    """Every byte of it NaN, as far as there are NaNs."""
    geometry, dtypes = geometry_of(kind), DtypePolicy(temporal, conv, quantized)
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(geometry.num_layers, geometry.units_per_layer, generator=generator) < share
    [rank_layout] = rank_layouts(geometry, mask, kind=layout, dtypes=dtypes)
    storage = TensorStorage(
        geometry, native, dtypes, layout=rank_layout, compressed_slots=compressed, codec=dasc.reference
    )
    for pool in (storage.temporal, storage.conv, *storage._pool().parts):
        if pool is not None:
            pool.fill_(NAN if pool.is_floating_point() else 99)
    return storage


def fill(storage: TensorStorage, slot: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for pool in (storage.temporal, storage.conv):
        pool[:, slot] = torch.randn(pool[:, slot].shape, generator=generator).to(pool.dtype)
    return storage.temporal[:, slot].clone(), storage.conv[:, slot].clone()


def kept(storage: TensorStorage) -> torch.Tensor:
    geometry = storage.layout.geometry
    return storage.layout.mask.view(geometry.num_layers, geometry.num_value_heads, 1, geometry.units_per_head)


def is_poison(tensor: torch.Tensor) -> bool:
    return bool((tensor.isnan() if tensor.is_floating_point() else tensor == 99).all())


CASES = {
    "kind": st.sampled_from(["gdn", "kda"]),
    "layout": st.sampled_from(["ragged", "padded"]),
    "share": st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    "quantized": st.sampled_from([None, "int8", "int4"]),
    "seed": st.integers(0, 99),
}


@settings(max_examples=40)
@given(**CASES)
def test_all_parts_of_a_checkpoint_come_back_and_omitted_units_are_zero(
    kind: str, layout: str, share: float, quantized: Quantization | None, seed: int
):
    """Fault 13: store, free, reallocate, load; the slot loaded into was full of something else."""
    storage = storage_of(kind, share, layout=layout, quantized=quantized, seed=seed)
    temporal, conv = fill(storage, 2, seed)
    storage.pack(2, 3)
    fill(storage, 2, seed + 1)  # the source is somebody else's now
    fill(storage, 1, seed + 2)
    storage.pack(1, 1)
    storage.load(3, 2, position=8)
    expected = temporal * kept(storage)
    if quantized:
        step = expected.abs().amax(dim=2, keepdim=True) / {"int8": 127, "int4": 7}[quantized]
        tolerance = step / 2 * 1.001
        assert ((storage.temporal[:, 2] - expected).abs() <= tolerance).all()
    else:
        assert torch.equal(storage.temporal[:, 2], expected)
    assert torch.equal(storage.conv[:, 2], conv)


@settings(max_examples=40)
@given(**CASES)
def test_slots_not_named_stay_bit_for_bit(
    kind: str, layout: str, share: float, quantized: Quantization | None, seed: int
):
    storage = storage_of(kind, share, layout=layout, quantized=quantized, seed=seed)
    fill(storage, 1)
    storage.pack(1, 2)
    storage.load(2, 3, position=8)
    storage.copy([(1, 4)])
    storage.clear([1])
    for slot in (0, 2):
        assert is_poison(storage.temporal[:, slot])
        assert is_poison(storage.conv[:, slot])
    for slot in (0, 1, 3):
        assert all(part is None or is_poison(part) for part in storage._pool().slot(slot))


@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_checkpoints_take_the_dtypes_of_the_pools(kind: str, dtype: torch.dtype):
    """Fault 24: FP32 stays FP32, to the last bit, and convolution rows what they are."""
    storage = storage_of(kind, 1.0, temporal=dtype, conv=dtype)
    state = fill(storage, 1)
    storage.pack(1, 1)
    storage.load(1, 2, position=1)
    storage.copy([(2, 3)])
    for slot in (2, 3):
        for pool, expected in zip((storage.temporal, storage.conv), state):
            assert pool.dtype == dtype
            assert torch.equal(pool[:, slot], expected)


def test_a_cleared_slot_is_zero():
    """Fault 11."""
    storage = storage_of("kda")
    storage.clear([1, 4])
    for slot in (1, 4):
        assert not storage.temporal[:, slot].any()
        assert not storage.conv[:, slot].any()


@settings(max_examples=40)
@given(**CASES, conv=st.sampled_from([torch.bfloat16, torch.float32]))
def test_bytes_are_those_of_the_accounting(
    kind: str, layout: str, share: float, quantized: Quantization | None, seed: int, conv: torch.dtype
):
    storage = storage_of(kind, share, layout=layout, quantized=quantized, seed=seed, conv=conv)
    dense, slot = geometry_of(kind).dense_bytes(storage.layout.dtypes), storage.layout.slot_bytes
    assert (storage.native_slot_bytes, storage.compressed_slot_bytes) == (dense, slot)
    assert (storage.native_bytes, storage.compressed_bytes) == (5 * dense, 4 * slot)
    tmp = staging_bytes(storage.layout)
    assert tmp == 2 * (dense + slot)
    split = split_budget(
        5 * dense + 4 * slot + tmp, dense_slot_bytes=dense, compressed_slot_bytes=slot, native_slots=4, tmp_bytes=tmp
    )
    assert (split.native_bytes, split.compressed_bytes) == (storage.native_bytes, storage.compressed_bytes)
    assert (split.compressed_slots, split.unused_bytes) == (3, 0)


def test_scratch_is_one_layer_of_each_refreshed_sequence():
    assert scratch_bytes(geometry_of("kda"), DtypePolicy(), 7) == 7 * 4 * 4 * 5 * 4


def test_a_dense_storage_has_no_compressed_bytes():
    storage = TensorStorage(geometry_of("gdn"), 2, DtypePolicy())
    assert storage.compressed_bytes == storage.compressed_slot_bytes == 0
    for operation in (lambda: storage.pack(1, 1), lambda: storage.load(1, 1, 1)):
        with pytest.raises(ValueError, match="no compressed pool"):
            operation()


def test_storages_that_cannot_be_are_refused():
    geometry, dtypes = geometry_of("kda"), DtypePolicy()
    [layout] = rank_layouts(geometry, torch.ones(2, 20, dtype=torch.bool))
    with pytest.raises(ValueError, match="native_slots >= 1"):
        TensorStorage(geometry, 0, dtypes)
    with pytest.raises(ValueError, match="compressed_slots >= 0"):
        TensorStorage(geometry, 1, dtypes, compressed_slots=-1)
    with pytest.raises(ValueError, match="2 compressed slots need a layout and a codec"):
        TensorStorage(geometry, 1, dtypes, compressed_slots=2, layout=layout)
    for other in ((geometry_of("gdn"), dtypes), (geometry, DtypePolicy(quantized="int8"))):
        with pytest.raises(ValueError, match="layout must be for"):
            TensorStorage(other[0], 1, other[1], layout=layout)
