import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dasc.reference.int8 import dequantize, quantize

EPS32 = torch.finfo(torch.float32).eps

seeds = st.integers(0, 2**31 - 1)


@st.composite
def values(draw, dtype=torch.float32):
    """State or packed units, with magnitudes from far below 1e-8 to near the FP32 limit, and zero columns."""
    v_dim = draw(st.sampled_from([-1, -2]))
    lead = draw(st.sampled_from([(), (0,), (3,), (2, 3)]))
    V, K = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    shape = (*lead, V, K) if v_dim == -2 else (*lead, V)
    gen = torch.Generator().manual_seed(draw(seeds))
    exponents = torch.randint(-12, 37, shape, generator=gen) if draw(st.booleans()) else torch.zeros(shape)
    x = torch.randn(shape, generator=gen, dtype=torch.float64) * 10.0 ** exponents.double()
    x = x * (torch.rand(shape, generator=gen) < draw(st.sampled_from([0.0, 0.5, 1.0])))
    return x.to(dtype), v_dim


@given(values())
def test_scales_and_codes_are_eq_8_column_by_column(case):
    x, v_dim = case
    q, scales = quantize(x, v_dim)
    assert q.dtype == torch.int8
    assert scales.dtype == x.dtype
    columns, codes = x.movedim(v_dim, -1).reshape(-1, x.shape[v_dim]), q.movedim(v_dim, -1).reshape(-1, x.shape[v_dim])
    for column, code, scale in zip(columns, codes, scales.flatten(), strict=True):
        absmax = max(abs(value) for value in column.tolist())
        assert scale == torch.tensor(max(absmax, torch.tensor(1e-8).item())) / 127
        # Python's round() is half to even, on the FP32 quotient
        quotients = [(value / scale).item() for value in column]
        assert code.tolist() == [min(127, max(-127, round(value))) for value in quotients]


@given(values())
def test_error_is_at_most_half_a_scale(case):
    x, v_dim = case
    q, scales = quantize(x, v_dim)
    step = scales.unsqueeze(v_dim).double()
    error = (dequantize(q, scales, v_dim).double() - x.double()).abs()
    # beside the rounding to a code: one FP32 rounding each of the scale (127 times), the quotient and the product
    assert (error <= step / 2 + 2 * EPS32 * 127 * step).all()


@given(values())
@example((torch.full((2, 1), 3.0000002), -2))
def test_quantising_again_changes_no_code(case):
    x, v_dim = case
    q, scales = quantize(x, v_dim)
    again = quantize(dequantize(q, scales, v_dim), v_dim)
    represented = scales > 1e-8 / 127  # below the floor the largest code is not 127
    assert torch.equal(again.q, q)
    # absmax / 127 need not divide back exactly: the scale may move by one unit in the last place
    torch.testing.assert_close(again.scales[represented], scales[represented], rtol=EPS32, atol=0)


@given(values())
def test_zeros_stay_exactly_zero_and_signs_stay(case):
    x, v_dim = case
    restored = dequantize(*quantize(x, v_dim), v_dim)
    assert (restored[x == 0] == 0).all()
    assert (restored * x.sign() >= 0).all()
    assert torch.equal(quantize(-x, v_dim).q, -quantize(x, v_dim).q)


def test_largest_value_of_a_column_is_coded_127_and_halves_go_to_even():
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -127.0]]) * 0.25
    q, scales = quantize(x, -1)
    assert q.tolist() == [[127, 0, 2, 2, 0, -127]]
    assert scales.tolist() == [0.25]


def test_floor_keeps_a_column_of_tiny_values_finite():
    q, scales = quantize(torch.tensor([[0.0, 0.0], [4e-9, -1e-12]]), -1)
    assert q.tolist() == [[0, 0], [51, 0]]  # 50.8 and -0.0127 steps of 1e-8 / 127
    assert scales.tolist() == [(torch.tensor(1e-8) / 127).item()] * 2


@given(values(dtype=torch.float64), st.sampled_from([torch.float64, torch.bfloat16]))
def test_scales_have_the_source_dtype_and_codes_those_of_fp32(case, dtype):
    """Fault 24: FP32 stays FP32, and so do the others."""
    x, v_dim = case
    x = x.to(dtype)
    q, scales = quantize(x, v_dim)
    expected = quantize(x.float(), v_dim)
    assert torch.equal(q, expected.q)
    assert torch.equal(scales, expected.scales.to(dtype))
    assert dequantize(q, scales, v_dim).dtype == dtype


@given(HV=st.integers(1, 3), V=st.integers(1, 4), K=st.integers(1, 5), seed=seeds)
def test_scale_of_a_channel_is_the_same_in_the_state_and_in_a_packed_unit(HV, V, K, seed):
    """Fault 25: V and K differ, so that a scale over the wrong axis has the wrong shape."""
    state = torch.randn(HV, V, K, generator=torch.Generator().manual_seed(seed))
    in_state, in_units = quantize(state, -2), quantize(state.transpose(1, 2).reshape(HV * K, V), -1)
    assert in_state.scales.shape == (HV, K)
    assert torch.equal(in_units.scales, in_state.scales.flatten())
    assert torch.equal(in_units.q, in_state.q.transpose(1, 2).reshape(HV * K, V))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_state_that_is_not_finite_is_refused(bad):
    with pytest.raises(ValueError, match="must be finite in float32"):
        quantize(torch.tensor([1.0, bad]), -1)


def test_fp64_state_beyond_fp32_is_refused():
    with pytest.raises(ValueError, match="must be finite in float32"):
        quantize(torch.tensor([1e300], dtype=torch.float64), -1)


def test_wrong_dtypes_and_shapes_are_refused():
    q, scales = quantize(torch.ones(3, 2), -2)
    with pytest.raises(ValueError, match="values must be floating point"):
        quantize(q, -2)
    with pytest.raises(ValueError, match="q must be int8"):
        dequantize(q.int(), scales, -2)
    with pytest.raises(ValueError, match="q must be int8"):
        dequantize(q, scales.int(), -2)
    with pytest.raises(ValueError, match="scales must have the shape"):
        dequantize(q, scales, -1)
    with pytest.raises(ValueError, match="scales must have the shape"):
        dequantize(q, torch.ones(1), -2)
