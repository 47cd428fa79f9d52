"""Both gates of eq. 2 against exact arithmetic, at ordinary inputs and at the ends of the number range."""

import math
from decimal import Decimal, localcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dasc.reference.gates import beta_gate, safe_gate, softplus_gate

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def exact_softplus_gate(a: float, A_log: float, dt_bias: float) -> Decimal:
    with localcontext(prec=60, Emax=10**9, Emin=-(10**9)):
        x = Decimal(a) + Decimal(dt_bias)
        if x < -100:  # ln(1 + y) = y - y^2 / 2 + ...
            return -(Decimal(A_log) + x).exp()
        return -Decimal(A_log).exp() * (1 + x.exp()).ln()


def exact_safe_gate(a: float, A_log: float, dt_bias: float, lower_bound: float) -> Decimal:
    with localcontext(prec=60, Emax=10**9, Emin=-(10**9)):
        x = Decimal(A_log).exp() * (Decimal(a) + Decimal(dt_bias))
        if x < -(10**6):
            return Decimal(0)
        return Decimal(lower_bound) / (1 + (-x).exp())


def assert_near(got: torch.Tensor, exact: Decimal, eps: float) -> None:
    """Within ``eps``, relative, above the dtype's normal numbers; below them only the order of size is kept."""
    info = torch.finfo(got.dtype)
    if abs(exact) > info.max:
        assert got == -torch.inf
    else:
        assert abs(Decimal(float(got)) - exact) <= abs(exact) * Decimal(eps) + Decimal(info.tiny)


VALUES = st.one_of(st.floats(-30, 30), st.floats(-900, 900), st.sampled_from([0.0, 1e-40, -1e-40, -745.0, 709.0]))


@DTYPES
@given(a=VALUES, A_log=VALUES, dt_bias=VALUES, lower_bound=st.sampled_from([-5.0, -0.1]))
def test_gates_equal_exact_arithmetic(dtype, a, A_log, dt_bias, lower_bound):
    a, A_log, dt_bias = (torch.tensor([x], dtype=dtype) for x in (a, A_log, dt_bias))
    # rounding of a + dt_bias moves exp(A_log) * (a + dt_bias), and A_log + log(...), by this much
    size = max(1.0, *(abs(float(x)) for x in (a, A_log, dt_bias)))
    eps = 8 * torch.finfo(dtype).eps * size
    x = float(a + dt_bias)
    assert_near(softplus_gate(a, A_log, dt_bias), exact_softplus_gate(x, float(A_log), 0.0), eps)
    # the sigmoid's relative error is the absolute one of its argument, which underflows beyond ~800
    argument = min(math.exp(min(float(A_log), 700.0)) * abs(x), 1000.0)
    lower = float(torch.tensor(lower_bound, dtype=dtype))
    assert_near(
        safe_gate(a, A_log, dt_bias, lower_bound),
        exact_safe_gate(x, float(A_log), 0.0, lower),
        eps * (1 + argument),
    )


@DTYPES
def test_ordinary_inputs_cost_only_a_few_roundings(dtype):
    """No shortcut for large inputs, no detour by logarithms: horizons are compared strictly."""
    eps = torch.finfo(dtype).eps
    for A_log in (-8.0, -1.0, 0.0, 5.0):
        for x in (-30.0, -3.0, -0.25, 0.0, 0.5, 7.0, 20.5, 25.0, 33.0):
            a, rate, zero = (torch.tensor([number], dtype=dtype) for number in (x, A_log, 0.0))
            assert_near(softplus_gate(a, rate, zero), exact_softplus_gate(x, A_log, 0.0), 4 * eps)
            argument = abs(math.exp(A_log) * x)
            if argument < 80:
                got = safe_gate(a, rate, zero, -5.0)
                assert_near(got, exact_safe_gate(x, A_log, 0.0, -5.0), (4 + 2 * argument) * eps)


@DTYPES
@given(
    numbers=st.lists(
        st.one_of(
            st.sampled_from([0.0, 3e38, -3e38, 1e-45, -1e-45, 100.0, -100.0, 88.8, -104.0]), st.floats(-3e38, 3e38)
        ),
        min_size=3,
        max_size=3,
    )
)
def test_no_finite_input_gives_nan_or_a_growing_state(dtype, numbers):
    a, A_log, dt_bias = (torch.tensor([x], dtype=dtype) for x in numbers)
    for g in (softplus_gate(a, A_log, dt_bias), safe_gate(a, A_log, dt_bias, -5.0)):
        assert g <= 0  # false for NaN
        assert g.exp() <= 1
    assert safe_gate(a, A_log, dt_bias, -5.0) >= -5


def test_a_rate_beyond_fp32_times_a_vanishing_softplus_is_the_true_product():
    """exp(100) is infinite and softplus(-150) zero in FP32; their product is exp(-50)."""
    g = softplus_gate(torch.tensor([-150.0]), torch.tensor([100.0]), torch.tensor([0.0]))
    torch.testing.assert_close(g, torch.tensor([-math.exp(-50)]), rtol=1e-5, atol=0)


def test_a_vanishing_gate_keeps_its_sign():
    """So that a horizon ln(epsilon) / g is plus infinity, not minus."""
    zero = torch.zeros(1, dtype=torch.float64)
    assert (1 / softplus_gate(zero - 1000, zero, zero)) == -torch.inf
    assert (1 / safe_gate(zero - 1000, zero + 10, zero, -5.0)) == -torch.inf


@DTYPES
def test_safe_gate_with_an_infinite_rate_at_zero_is_half_its_bound(dtype):
    one = torch.ones(1, dtype=dtype)
    assert safe_gate(one, 2000 * one, -one, -5.0) == -2.5


def test_gdn_takes_a_rate_and_a_bias_for_each_head():
    gen = torch.Generator().manual_seed(0)
    a, A_log, dt_bias = (torch.randn(*shape, generator=gen, dtype=torch.float64) for shape in ((2, 3, 4), (4,), (4,)))
    g = softplus_gate(a, A_log, dt_bias)
    expected = -A_log.exp() * torch.log(1 + torch.exp(a + dt_bias))
    torch.testing.assert_close(g, expected)


@pytest.mark.parametrize("gate", ["softplus", "safe"])
def test_kda_takes_a_rate_for_each_head_and_a_bias_for_each_channel(gate):
    """Fault 30. HV = K, so that a wrong broadcast would not fail by shape."""
    gen = torch.Generator().manual_seed(0)
    a, A_log, dt_bias = (torch.randn(*shape, generator=gen, dtype=torch.float64) for shape in ((2, 4, 4), (4,), (4, 4)))
    for h in range(4):
        for k in range(4):
            x, rate = a[:, h, k] + dt_bias[h, k], A_log[h].exp()
            if gate == "softplus":
                got, expected = softplus_gate(a, A_log, dt_bias), -rate * torch.log(1 + x.exp())
            else:
                got, expected = safe_gate(a, A_log, dt_bias, -5.0), -5.0 / (1 + (-rate * x).exp())
            torch.testing.assert_close(got[:, h, k], expected)


def test_one_gate_input_serves_all_layers_and_units():
    """As static horizons use it: a_s has no axes, the parameters lead with the layers."""
    gen = torch.Generator().manual_seed(0)
    A_log, dt_bias = torch.randn(2, 3, generator=gen).double(), torch.randn(2, 3, 4, generator=gen).double()
    a_s = torch.tensor(-0.3, dtype=torch.float64)
    for gate in (softplus_gate, lambda *x: safe_gate(*x, -5.0)):
        g = gate(a_s, A_log, dt_bias)
        assert g.shape == (2, 3, 4)
        for layer in range(2):
            torch.testing.assert_close(g[layer], gate(a_s.expand(3, 4), A_log[layer], dt_bias[layer]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_parameters_are_computed_in_fp32(dtype):
    """Fault 29."""
    a, A_log, dt_bias = (torch.tensor([x], dtype=dtype) for x in (0.7, -2.3, 0.9))
    wide = [x.float() for x in (a, A_log, dt_bias)]
    assert softplus_gate(a, A_log, dt_bias).dtype == torch.float32
    assert torch.equal(softplus_gate(a, A_log, dt_bias), softplus_gate(*wide))
    assert torch.equal(safe_gate(a, A_log, dt_bias, -5.0), safe_gate(*wide, -5.0))
    assert torch.equal(beta_gate(a), beta_gate(wide[0]))
    assert softplus_gate(a, A_log.double(), dt_bias).dtype == torch.float64


def test_beta_is_a_sigmoid_and_twice_it_with_negative_eigenvalues():
    b = torch.tensor([-200.0, 0.0, 1.0, 200.0])
    torch.testing.assert_close(beta_gate(b), torch.tensor([0.0, 0.5, 1 / (1 + math.exp(-1)), 1.0]))
    assert torch.equal(beta_gate(b, allow_neg_eigval=True), 2 * beta_gate(b))


def test_wrong_arguments_are_refused_by_name():
    a, A_log, dt_bias = torch.zeros(2, 3, 4), torch.zeros(3), torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"^a must end"):
        softplus_gate(a[..., 0], A_log, dt_bias)
    with pytest.raises(ValueError, match=r"^dt_bias must have"):
        softplus_gate(a, A_log[:2], dt_bias)
    with pytest.raises(ValueError, match=r"^dt_bias must have"):
        softplus_gate(a, A_log, torch.zeros(3, 4, 1))
    with pytest.raises(ValueError, match=r"^A_log must be a floating-point"):
        softplus_gate(a, A_log.long(), dt_bias)
    with pytest.raises(ValueError, match=r"^b must be a floating-point"):
        beta_gate(torch.zeros(3, dtype=torch.int64))
    for bound in (0.0, 5.0, -math.inf, math.nan):
        with pytest.raises(ValueError, match=r"^lower_bound must"):
            safe_gate(a, A_log, dt_bias, bound)
