"""The gates, interpreted, against the reference, which is checked against exact arithmetic."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from dasc import reference
from dasc.fast.triton import gates

# numpy, which interprets, says where a branch not taken overflows
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter")
VALUES = st.one_of(st.floats(-30, 30), st.floats(-900, 900), st.sampled_from([0.0, 1e-40, -1e-40, -87.0, 88.0]))
INFO = torch.finfo(torch.float32)


def assert_near(got, expected, ulps):
    """Within so many ulps above the normal numbers; below them only the order of size is kept."""
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=ulps * INFO.eps, atol=INFO.tiny)


@given(a=VALUES, A_log=VALUES, dt_bias=VALUES, lower_bound=st.sampled_from([-5.0, -0.1]))
@example(a=-150.0, A_log=100.0, dt_bias=0.0, lower_bound=-5.0)
@example(a=-50.0, A_log=100.0, dt_bias=0.0, lower_bound=-5.0)
@example(a=1e30, A_log=-100.0, dt_bias=0.0, lower_bound=-5.0)
@example(a=17.0, A_log=0.0, dt_bias=0.0, lower_bound=-5.0)
@example(a=-12.0, A_log=0.0, dt_bias=0.0, lower_bound=-5.0)
@example(a=1.0, A_log=900.0, dt_bias=-1.0, lower_bound=-5.0)
def test_gates_equal_the_reference_at_any_size(a, A_log, dt_bias, lower_bound):
    """Fault 29: rates that overflow and inputs that vanish, alone and against each other."""
    a, A_log, dt_bias = (torch.tensor([x]) for x in (a, A_log, dt_bias))
    # exp(A_log), and exp(A_log + x), hold this many ulps for each ulp of their argument
    size = max(1.0, *(abs(float(x)) for x in (a, A_log, dt_bias)))
    assert_near(gates.softplus_gate(a, A_log, dt_bias), reference.softplus_gate(a, A_log, dt_bias), 8 * size)
    # the sigmoid's relative error is the absolute one of its argument, which underflows beyond ~800
    argument = min(math.exp(min(float(A_log), 700.0)) * abs(float(a + dt_bias)), 1000.0)
    got = gates.safe_gate(a, A_log, dt_bias, lower_bound)
    assert_near(got, reference.safe_gate(a, A_log, dt_bias, lower_bound), 8 * size * (1 + argument))


@given(
    numbers=st.lists(
        st.one_of(st.sampled_from([0.0, 3e38, -3e38, 1e-45, 100.0]), st.floats(-3e38, 3e38)),
        min_size=3,
        max_size=3,
    )
)
def test_no_finite_input_gives_nan_or_a_growing_state(numbers):
    a, A_log, dt_bias = (torch.tensor([x]) for x in numbers)
    for g in (gates.softplus_gate(a, A_log, dt_bias), gates.safe_gate(a, A_log, dt_bias, -5.0)):
        assert g <= 0  # false for NaN
    assert gates.safe_gate(a, A_log, dt_bias, -5.0) >= -5


def test_a_vanishing_gate_keeps_its_sign():
    """So that a horizon ln(epsilon) / g is plus infinity, not minus."""
    zero = torch.zeros(1)
    assert (1 / gates.softplus_gate(zero - 1000, zero, zero)) == -torch.inf
    assert (1 / gates.safe_gate(zero - 1000, zero + 10, zero, -5.0)) == -torch.inf


def test_nan_in_is_nan_out():
    nan, zero = torch.tensor([torch.nan, -1.0, -100.0]), torch.zeros(3)
    for arguments in ((nan, zero, zero), (zero, nan, zero), (zero, zero, nan)):
        assert gates.softplus_gate(*arguments).isnan().tolist() == [True, False, False]
        assert gates.safe_gate(*arguments, -5.0).isnan().tolist() == [True, False, False]
    assert gates.beta_gate(nan).isnan().tolist() == [True, False, False]


@given(
    seed=st.integers(0, 2**31 - 1),
    channel_gate=st.booleans(),
    layers=st.booleans(),
    dtype=st.sampled_from([torch.float16, torch.float32]),
    parameters=st.sampled_from([torch.float16, torch.float32]),
    strided=st.booleans(),
)
def test_axes_and_dtypes_are_those_of_the_reference(seed, channel_gate, layers, dtype, parameters, strided):
    """Faults 26, 30: a rate for each head, a bias for each channel. HV = K: a wrong broadcast has a good shape."""
    gen = torch.Generator().manual_seed(seed)
    A_shape = (2, 4) if layers else (4,)
    unit = (*A_shape, 4) if channel_gate else A_shape
    A_log = torch.randn(A_shape, generator=gen).to(parameters)
    dt_bias = torch.randn(unit, generator=gen).to(parameters)
    a = torch.randn(2, 9, *unit, generator=gen).to(dtype)
    if strided:
        a = torch.stack([a, a + 1], dim=-1)[..., 0].transpose(0, 1)
        A_log, dt_bias = (torch.stack([x, x + 1], dim=-1)[..., 0] for x in (A_log, dt_bias))
    original, one = a.clone(), a.new_tensor(0.3)
    for got, expected in (
        (gates.softplus_gate(a, A_log, dt_bias), reference.softplus_gate(a, A_log, dt_bias)),
        (gates.safe_gate(a, A_log, dt_bias, -5.0), reference.safe_gate(a, A_log, dt_bias, -5.0)),
        (gates.softplus_gate(one, A_log, dt_bias), reference.softplus_gate(one, A_log, dt_bias)),
        (gates.beta_gate(a), reference.beta_gate(a)),
        (gates.beta_gate(a, allow_neg_eigval=True), reference.beta_gate(a, allow_neg_eigval=True)),
    ):
        assert got.shape == expected.shape
        assert_near(got, expected, 256)
    assert torch.equal(a, original)


def test_rows_that_share_memory_are_not_one_value():
    """Fault 26: an expanded input has rows 0 apart."""
    gen = torch.Generator().manual_seed(0)
    row, A_log, dt_bias = (torch.randn(4, generator=gen) for _ in range(3))
    a = row.expand(3, 4)
    assert_near(gates.softplus_gate(a, A_log, dt_bias), reference.softplus_gate(a, A_log, dt_bias), 64)
    assert_near(gates.beta_gate(a), reference.beta_gate(a), 64)


def test_many_elements_are_several_programs():
    a, zero = torch.linspace(-20, 20, 3 * 11_000).view(-1, 3), torch.zeros(3)
    assert_near(gates.softplus_gate(a, zero, zero), reference.softplus_gate(a, zero, zero), 64)
    assert_near(gates.beta_gate(a), reference.beta_gate(a), 64)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0, 3)])
def test_no_elements(shape):
    zero = torch.zeros(3)
    assert gates.softplus_gate(torch.zeros(shape), zero, zero).shape == shape
    assert gates.beta_gate(torch.zeros(shape)).shape == shape
    assert gates.beta_gate(torch.zeros(())).shape == ()


def test_wrong_arguments_are_named():
    three, zero = torch.zeros(3), torch.zeros(2)
    with pytest.raises(ValueError, match="dt_bias must have the axes of A_log"):
        gates.softplus_gate(three, zero, three)
    with pytest.raises(ValueError, match=r"lower_bound must be negative and finite, got 1\.0"):
        gates.safe_gate(three, three, three, 1.0)
    with pytest.raises(ValueError, match=r"b must be a floating-point tensor, got torch\.int64"):
        gates.beta_gate(torch.tensor([1]))
    with pytest.raises(
        ValueError, match=r"a must be float32, bfloat16 or float16 for impl 'triton', got torch\.float64"
    ):
        gates.softplus_gate(three.double(), three, three)
