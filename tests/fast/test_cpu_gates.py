"""The gates of the CPU path against the reference's, which are checked against exact arithmetic."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dasc import fast, reference

VALUES = st.one_of(st.floats(-30, 30), st.floats(-900, 900), st.sampled_from([0.0, 1e-40, -1e-40, -745.0, 709.0]))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def assert_near(got, expected, ulps):
    """Within so many ulps above the dtype's normal numbers; below them only the order of size is kept."""
    info = torch.finfo(got.dtype)
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=ulps * info.eps, atol=info.tiny)


@DTYPES
@given(a=VALUES, A_log=VALUES, dt_bias=VALUES, lower_bound=st.sampled_from([-5.0, -0.1]))
@example(a=-150.0, A_log=100.0, dt_bias=0.0, lower_bound=-5.0)
@example(a=-50.0, A_log=100.0, dt_bias=0.0, lower_bound=-5.0)
@example(a=1e30, A_log=-100.0, dt_bias=0.0, lower_bound=-5.0)
@example(a=17.0, A_log=0.0, dt_bias=0.0, lower_bound=-5.0)
@example(a=1.0, A_log=900.0, dt_bias=-1.0, lower_bound=-5.0)
def test_gates_equal_the_reference_at_any_size(dtype, a, A_log, dt_bias, lower_bound):
    """Fault 29: rates that overflow and inputs that vanish, alone and against each other."""
    a, A_log, dt_bias = (torch.tensor([x], dtype=dtype) for x in (a, A_log, dt_bias))
    # exp(A_log), and exp(A_log + x), hold this many ulps for each ulp of their argument
    size = max(1.0, *(abs(float(x)) for x in (a, A_log, dt_bias)))
    assert_near(fast.softplus_gate(a, A_log, dt_bias), reference.softplus_gate(a, A_log, dt_bias), 8 * size)
    # the sigmoid's relative error is the absolute one of its argument, which underflows beyond ~800
    argument = min(math.exp(min(float(A_log), 700.0)) * abs(float(a + dt_bias)), 1000.0)
    got = fast.safe_gate(a, A_log, dt_bias, lower_bound)
    assert_near(got, reference.safe_gate(a, A_log, dt_bias, lower_bound), 8 * size * (1 + argument))


@DTYPES
@given(
    numbers=st.lists(
        st.one_of(st.sampled_from([0.0, 3e38, -3e38, 1e-45, 100.0]), st.floats(-3e38, 3e38)), min_size=3, max_size=3
    )
)
def test_no_finite_input_gives_nan_or_a_growing_state(dtype, numbers):
    a, A_log, dt_bias = (torch.tensor([x], dtype=dtype) for x in numbers)
    for g in (fast.softplus_gate(a, A_log, dt_bias), fast.safe_gate(a, A_log, dt_bias, -5.0)):
        assert g <= 0  # false for NaN
    assert fast.safe_gate(a, A_log, dt_bias, -5.0) >= -5


@DTYPES
def test_a_vanishing_gate_keeps_its_sign(dtype):
    """So that a horizon ln(epsilon) / g is plus infinity, not minus."""
    zero = torch.zeros(1, dtype=dtype)
    assert (1 / fast.softplus_gate(zero - 1000, zero, zero)) == -torch.inf
    assert (1 / fast.safe_gate(zero - 1000, zero + 10, zero, -5.0)) == -torch.inf


def test_nan_in_is_nan_out():
    nan, zero = torch.tensor([torch.nan, -1.0, -100.0]), torch.zeros(3)
    assert fast.softplus_gate(nan, zero, zero).isnan().tolist() == [True, False, False]
    assert fast.safe_gate(nan, zero, zero, -5.0).isnan().tolist() == [True, False, False]


@given(
    seed=st.integers(0, 2**31 - 1),
    channel_gate=st.booleans(),
    layers=st.booleans(),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    parameters=st.sampled_from([torch.bfloat16, torch.float32, torch.float64]),
    strided=st.booleans(),
)
def test_axes_and_dtypes_are_those_of_the_reference(seed, channel_gate, layers, dtype, parameters, strided):
    """Fault 30: a rate for each head, a bias for each channel. HV = K, so that a wrong broadcast has a good shape."""
    gen = torch.Generator().manual_seed(seed)
    A_shape = (2, 4) if layers else (4,)
    bias_shape = (*A_shape, 4) if channel_gate else A_shape
    a = torch.randn(3, *bias_shape, generator=gen).to(dtype)
    if strided:
        a = torch.stack([a, a + 1], dim=-1)[..., 0]
    A_log, dt_bias = (torch.randn(*shape, generator=gen).to(parameters) for shape in (A_shape, bias_shape))
    original = a.clone()
    for gate_input in (a, a.flatten()[0]):  # one value for all units has no axes
        assert_near(
            fast.softplus_gate(gate_input, A_log, dt_bias), reference.softplus_gate(gate_input, A_log, dt_bias), 8
        )
        got = fast.safe_gate(gate_input, A_log, dt_bias, -5.0)
        assert_near(got, reference.safe_gate(gate_input, A_log, dt_bias, -5.0), 200)
    for double in (False, True):
        expected = reference.beta_gate(a, allow_neg_eigval=double)
        assert_near(fast.beta_gate(a, allow_neg_eigval=double), expected, 2)
    assert torch.equal(a, original)


def test_wrong_arguments_are_refused_by_name():
    a, A_log, dt_bias = torch.zeros(2, 3, 4), torch.zeros(3), torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"^a must end"):
        fast.softplus_gate(a[..., 0], A_log, dt_bias)
    with pytest.raises(ValueError, match=r"^dt_bias must have"):
        fast.safe_gate(a, A_log[:2], dt_bias, -5.0)
    with pytest.raises(ValueError, match=r"^b must be a floating-point"):
        fast.beta_gate(torch.zeros(3, dtype=torch.int64))
    for bound in (0.0, 5.0, -math.inf, math.nan):
        with pytest.raises(ValueError, match=r"^lower_bound must"):
            fast.safe_gate(a, A_log, dt_bias, bound)
