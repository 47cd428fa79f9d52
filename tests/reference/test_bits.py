"""Units of several widths: what they load as, and what they take."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dasc.geometry import DtypePolicy, StateGeometry
from dasc.layout import RaggedLayout
from dasc.reference import pack, unpack
from dasc.reference.bits import BITS, allocation_bytes, pack_bits, unit_bytes, unpack_bits
from tests.masks import gdn, kda, seeded_mask

seeds = st.integers(0, 2**31 - 1)


@st.composite
def geometries(draw: st.DrawFn) -> StateGeometry:
    """Odd and even units, V = 1 among them."""
    kind = draw(st.sampled_from([gdn, kda]))
    return kind(draw(st.integers(1, 2)), v_dim=draw(st.integers(1, 5)), k_dim=draw(st.integers(1, 5)))


def drawn_bits(geometry: StateGeometry, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    choice = torch.randint(len(BITS), (geometry.num_layers, geometry.units_per_layer), generator=generator)
    return torch.tensor(BITS)[choice]


def drawn_state(geometry: StateGeometry, seed: int, N: int = 2, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    L, *rest = geometry.state_shape
    state = torch.randn(L, N, *rest, generator=generator, dtype=torch.float64)
    return (state * 10 ** torch.randint(-3, 4, (L, 1, *rest[:1], 1, 1), generator=generator).double()).to(dtype)


def by_element(bits: torch.Tensor, geometry: StateGeometry) -> torch.Tensor:
    """``[L, 1, HV, 1, K or 1]``, to be compared with a state."""
    return bits.view(geometry.num_layers, 1, geometry.num_value_heads, 1, geometry.units_per_head)


@given(geometries(), seeds, st.sampled_from([torch.float32, torch.float64]))
def test_what_is_loaded_is_within_the_bound_of_its_bits(geometry: StateGeometry, seed: int, dtype: torch.dtype):
    """32 exactly; 16 half a unit in the last place; 8 and 4 half a step; dropped units zero. Scales run over V."""
    state, bits = drawn_state(geometry, seed, dtype=dtype), drawn_bits(geometry, seed)
    loaded = unpack_bits(pack_bits(state, bits, geometry), bits, geometry)
    assert loaded.dtype == dtype
    assert loaded.shape == state.shape
    largest = state.abs().amax(dim=-2, keepdim=True)
    bounds = {
        32: torch.zeros_like(state),
        16: (state.abs() * 2**-11).clamp(min=2**-25),
        8: (largest / 127 / 2).expand_as(state),
        4: (largest / 7 / 2).expand_as(state),
        0: state.abs(),
    }
    error = (loaded - state).abs()
    for width, bound in bounds.items():
        here = (by_element(bits, geometry) == width).expand_as(state)
        assert (error[here] <= bound[here] + 1e-4 * bound[here]).all(), width
        if width == 0:
            assert (loaded[here] == 0).all()


@given(geometries(), seeds, st.sampled_from([torch.float32, torch.float64]))
def test_bytes_are_those_of_the_stored_tensors(geometry: StateGeometry, seed: int, dtype: torch.dtype):
    """Two codes of four bits share a byte, and every scale is counted."""
    bits = drawn_bits(geometry, seed)
    packed = pack_bits(drawn_state(geometry, seed, N=3, dtype=dtype), bits, geometry)
    assert 3 * allocation_bytes(geometry, bits, dtype) == sum(part.nbytes for part in packed)


@pytest.mark.parametrize(
    ("geometry", "expected"),
    [
        (kda(v_dim=128, k_dim=128), {0: 0, 4: 68, 8: 132, 16: 256, 32: 512}),
        (gdn(v_dim=16, k_dim=32), {0: 0, 4: 256 + 128, 8: 512 + 128, 16: 1024, 32: 2048}),
        (kda(v_dim=3, k_dim=5), {0: 0, 4: 2 + 4, 8: 3 + 4, 16: 6, 32: 12}),
    ],
)
def test_bytes_of_a_unit(geometry: StateGeometry, expected: dict[int, int]):
    assert {width: unit_bytes(geometry, width) for width in BITS} == expected


@given(geometries(), seeds, st.sampled_from([4, 8, 32]), st.sampled_from([torch.float32, torch.float64]))
def test_keep_or_drop_takes_the_bytes_and_gives_the_state_of_the_ragged_layout(
    geometry: StateGeometry, seed: int, width: int, dtype: torch.dtype
):
    if width == 4:
        geometry = replace(geometry, head_v_dim=2 * geometry.head_v_dim)
    mask, state = seeded_mask(geometry, seed), drawn_state(geometry, seed, dtype=dtype)
    quantized = {4: "int4", 8: "int8", 32: None}[width]
    layout = RaggedLayout.from_mask(geometry, mask, DtypePolicy(temporal=dtype, quantized=quantized))
    bits = mask.long() * width
    assert allocation_bytes(geometry, bits, dtype) == layout.temporal_slot_bytes + layout.scale_slot_bytes
    conv = torch.zeros(geometry.num_layers, 2, *geometry.conv_shape[1:], dtype=torch.bfloat16)
    expected = unpack(pack(state, conv, layout), layout).temporal
    assert torch.equal(unpack_bits(pack_bits(state, bits, geometry), bits, geometry), expected)


def test_every_pair_of_four_bit_codes_comes_back():
    geometry = kda(layers=1, heads=1, v_dim=3, k_dim=15 * 15)
    pairs = torch.tensor([(7, a, b) for a, b in itertools.product(range(-7, 8), repeat=2)], dtype=torch.float32)
    state = pairs.T[None, None, None]
    bits = torch.full((1, 225), 4)
    packed = pack_bits(state, bits, geometry)
    assert packed.scales.unique().tolist() == [1.0]
    assert torch.equal(unpack_bits(packed, bits, geometry), state)


@settings(max_examples=20)
@given(seeds)
def test_more_bits_are_nearer_to_the_state(seed: int):
    geometry = kda(v_dim=32, k_dim=4)
    state = drawn_state(geometry, seed)
    errors = []
    for width in BITS:
        bits = torch.full((geometry.num_layers, geometry.units_per_layer), width)
        errors.append(float((unpack_bits(pack_bits(state, bits, geometry), bits, geometry) - state).norm()))
    assert errors == sorted(errors, reverse=True)
    assert len(set(errors)) == len(BITS)


def test_what_cannot_be_stored_is_refused():
    geometry = kda(layers=1, heads=1, v_dim=2, k_dim=1)
    state = torch.tensor([1.0, 7e4])[None, None, None, :, None]
    for width in (4, 8, 32):
        bits = torch.tensor([[width]])
        assert unpack_bits(pack_bits(state, bits, geometry), bits, geometry)[..., 1, 0] == pytest.approx(7e4)
    with pytest.raises(ValueError, match="units of 16 bits must be finite and at most 65504"):
        pack_bits(state, torch.tensor([[16]]), geometry)
    for width in (4, 8, 16):
        with pytest.raises(ValueError, match="must be finite"):
            pack_bits(state * math.nan, torch.tensor([[width]]), geometry)


def test_wrong_arguments_are_refused():
    geometry = kda()
    bits, state = drawn_bits(geometry, 0), drawn_state(geometry, 0)
    with pytest.raises(ValueError, match=r"bits must be torch.int64 \[2, 20\], got torch.float32"):
        pack_bits(state, bits.float(), geometry)
    with pytest.raises(ValueError, match=r"bits must be torch.int64 \[2, 20\], got torch.int64 \[20, 2\]"):
        allocation_bytes(geometry, bits.T, torch.float32)
    with pytest.raises(ValueError, match=r"bits must be out of .*, got 5"):
        pack_bits(state, torch.full_like(bits, 5), geometry)
    with pytest.raises(ValueError, match=r"bits must be out of .*, got 2"):
        unit_bytes(geometry, 2)
    with pytest.raises(ValueError, match="state must be FP32 or FP64"):
        pack_bits(state.half(), bits, geometry)
    with pytest.raises(ValueError, match="state must be FP32 or FP64"):
        pack_bits(state[:, 0], bits, geometry)
    packed = pack_bits(state, bits, geometry)
    with pytest.raises(ValueError, match="packed must hold 40 units of 32 bits"):
        unpack_bits(packed, torch.full_like(bits, 32), geometry)
