import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dasc.geometry import StateGeometry
from dasc.models.gate_parameters import GateParameters
from dasc.reference.horizons import (
    empirical_horizons,
    layer_fractions,
    mixed_pairs,
    one_step_decay,
    retained_fractions,
    state_magnitude,
    static_gate,
    static_horizons,
)

seeds = st.integers(0, 2**31 - 1)


def gate_parameters(gate: str, L: int, HV: int, K: int | None, seed: int) -> GateParameters:
    gen = torch.Generator().manual_seed(seed)
    A_log = torch.randn(L, HV, generator=gen, dtype=torch.float64)
    bias_shape = (L, HV) if K is None else (L, HV, K)
    dt_bias = 3 * torch.randn(*bias_shape, generator=gen, dtype=torch.float64)
    return GateParameters(gate, -5.0 if gate == "safe" else None, A_log, dt_bias)


@st.composite
def parameters(draw):
    return gate_parameters(
        draw(st.sampled_from(["softplus", "safe"])),
        L=draw(st.integers(1, 3)),
        HV=draw(st.sampled_from([1, 2, 4])),
        K=draw(st.sampled_from([None, 1, 3])),
        seed=draw(seeds),
    )


def single(gate: str, rate: float, bias: float) -> GateParameters:
    lower_bound = -5.0 if gate == "safe" else None
    A_log, dt_bias = torch.tensor([[[rate]], [[bias]]], dtype=torch.float64)
    return GateParameters(gate, lower_bound, A_log, dt_bias)


def geometry(kind: str, L: int, HV: int, K: int) -> StateGeometry:
    return StateGeometry("toy", kind, L, tuple(range(L)), HV, HV, head_v_dim=2, head_k_dim=K)


# static horizons


@given(params=parameters(), gate_input=st.floats(-3, 3))
def test_static_gate_is_eq_2_unit_by_unit_in_head_major_order(params, gate_input):
    """Fault 30: a bias for each channel, both gates."""
    L, HV = params.A_log.shape
    K = params.dt_bias[0, 0].numel()
    biases = params.dt_bias.reshape(L, HV, K)
    g = static_gate(params, gate_input)
    assert g.shape == (L, HV * K)
    assert g.dtype == torch.float64
    for layer in range(L):
        for h in range(HV):
            for k in range(K):
                rate = math.exp(params.A_log[layer, h])
                x = gate_input + float(biases[layer, h, k])
                if params.gate == "softplus":
                    expected = -rate * math.log1p(math.exp(x))
                else:
                    expected = -5.0 / (1 + math.exp(-rate * x))
                assert float(g[layer, h * K + k]) == pytest.approx(expected, rel=1e-12)


def test_static_horizon_of_known_parameters():
    # softplus(0) = ln 2, so one step halves the unit: log2(1000) steps to a thousandth
    assert static_horizons(single("softplus", 0.0, 0.3), -0.3).item() == pytest.approx(math.log2(1000), rel=1e-14)
    # sigmoid(0) = 1/2, so g = -2.5
    assert static_horizons(single("safe", 0.7, -0.8), 0.8).item() == pytest.approx(math.log(1000) / 2.5, rel=1e-14)
    assert static_horizons(single("softplus", 0.0, 0.3), -0.3, epsilon=0.5).item() == pytest.approx(1.0, rel=1e-14)


@given(params=parameters(), gate_input=st.floats(-3, 3), epsilon=st.floats(1e-6, 0.9))
def test_epsilon_is_left_after_a_horizon_of_one_step_decays(params, gate_input, epsilon):
    horizons = static_horizons(params, gate_input, epsilon)
    left = one_step_decay(params, gate_input) ** horizons
    # alpha is rounded once, and the power multiplies that error by the horizon
    budget = 4 * torch.finfo(torch.float64).eps * (horizons + 10)
    assert ((left / epsilon - 1).abs() <= budget).all()


@given(params=parameters(), low=st.floats(-3, 3), step=st.floats(0.01, 2))
def test_larger_gate_input_shortens_every_horizon(params, low, step):
    longer, shorter = static_horizons(params, low), static_horizons(params, low + step)
    saturated = longer <= -math.log(1e-3) / 4.999  # the safe gate at its bound
    assert ((shorter < longer) | (saturated & (params.gate == "safe"))).all()


@given(params=parameters(), epsilon=st.floats(1e-6, 0.4))
def test_smaller_epsilon_lengthens_every_horizon(params, epsilon):
    assert (static_horizons(params, 0.0, epsilon) > static_horizons(params, 0.0, 2 * epsilon)).all()


@given(
    gate=st.sampled_from(["softplus", "safe"]),
    A_log=st.floats(-1e4, 1e4),
    dt_bias=st.floats(-1e4, 1e4),
    gate_input=st.floats(-100, 100),
)
def test_extreme_parameters_give_a_positive_or_infinite_horizon_never_nan(gate, A_log, dt_bias, gate_input):
    assert (static_horizons(single(gate, A_log, dt_bias), gate_input) > 0).all()


@pytest.mark.parametrize("gate", ["softplus", "safe"])
def test_zero_log_decay_is_an_infinite_horizon(gate):
    """Fault 33: g exactly 0."""
    assert static_horizons(single(gate, 0.0, -5000.0), 0.0).item() == math.inf


def test_infinite_decay_is_a_tiny_positive_horizon():
    assert 0 < static_horizons(single("softplus", 800.0, 0.0), 0.0).item() < 1e-300


def test_parameters_stored_in_bf16_give_the_horizons_of_their_values():
    """Fault 29: FP64 from the stored values, whatever dtype stored them."""
    stored = gate_parameters("softplus", 2, 3, 4, seed=0)
    A_log, dt_bias = stored.A_log.bfloat16(), stored.dt_bias.bfloat16()
    from_bf16 = GateParameters("softplus", None, A_log.double(), dt_bias.double())
    from_fp32 = GateParameters("softplus", None, A_log.float().double(), dt_bias.float().double())
    assert torch.equal(static_horizons(from_bf16, -0.3), static_horizons(from_fp32, -0.3))
    in_bf16 = math.log(1e-3) / -(A_log.exp()[..., None] * torch.nn.functional.softplus(dt_bias - 0.3))
    assert not torch.allclose(in_bf16.double().flatten(1), static_horizons(from_bf16, -0.3), rtol=1e-6)


@pytest.mark.parametrize("epsilon", [0.0, 1.0, -0.1, 2.0, math.nan])
def test_epsilon_outside_the_open_unit_interval_is_refused(epsilon):
    with pytest.raises(ValueError, match="epsilon must be within"):
        static_horizons(single("softplus", 0.0, 0.0), 0.0, epsilon)
    with pytest.raises(ValueError, match="epsilon must be within"):
        empirical_horizons(torch.full((1, 1), -1.0), epsilon=epsilon)


@pytest.mark.parametrize("gate_input", [math.nan, math.inf, -math.inf])
def test_gate_input_that_is_not_finite_is_refused(gate_input):
    with pytest.raises(ValueError, match="gate_input must be finite"):
        static_gate(single("safe", 0.0, 0.0), gate_input)


# empirical horizons


@st.composite
def observed_gates(draw):
    P, T = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    tail = draw(st.sampled_from([(), (2,), (2, 3), (2, 3, 4)]))
    gen = torch.Generator().manual_seed(draw(seeds))
    g = -torch.rand(P, T, *tail, generator=gen, dtype=torch.float64)
    token_mask = torch.rand(P, T, generator=gen) < 0.6
    token_mask[:, draw(st.integers(0, T - 1))] = True
    return g, token_mask


@given(observed_gates())
def test_empirical_horizon_is_eq_4_over_non_padding_tokens_only(case):
    g, token_mask = case
    poisoned = g.clone()
    poisoned[~token_mask] = torch.nan
    horizons = empirical_horizons(poisoned, token_mask)
    for p in range(len(g)):
        mean = g[p, token_mask[p]].mean(dim=0)
        torch.testing.assert_close(horizons[p], math.log(1e-3) / mean, rtol=1e-12, atol=0)


@given(params=parameters(), T=st.integers(1, 5), gate_input=st.floats(-2, 2))
def test_gate_constant_over_time_has_its_static_horizon(params, T, gate_input):
    g = static_gate(params, gate_input)
    observed = g.expand(2, T, *g.shape)
    expected = static_horizons(params, gate_input).expand(2, *g.shape)
    torch.testing.assert_close(empirical_horizons(observed), expected, rtol=1e-12, atol=0)


def test_low_precision_gates_are_averaged_in_fp64():
    g = torch.full((1, 4096), -1e-3, dtype=torch.bfloat16)
    exact = math.log(1e-3) / float(g[0, 0])
    assert empirical_horizons(g).item() == pytest.approx(exact, rel=1e-12)


def test_gates_that_are_all_zero_have_an_infinite_horizon():
    assert empirical_horizons(torch.zeros(1, 3, 2)).tolist() == [[math.inf, math.inf]]


@pytest.mark.parametrize(
    ("g", "token_mask", "message"),
    [
        (torch.zeros(3), None, "g must be floating-point"),
        (torch.zeros(1, 3, dtype=torch.int64), None, "g must be floating-point"),
        (torch.zeros(1, 3), torch.ones(3, dtype=torch.bool), "token_mask must be"),
        (torch.zeros(1, 3), torch.ones(1, 3), "token_mask must be"),
        (torch.zeros(2, 3), torch.tensor([[True, True, True], [False] * 3]), "every prefix a token"),
        (torch.zeros(1, 0), None, "every prefix a token"),
        (torch.tensor([[-1.0, 0.5]]), None, "at most 0"),
        (torch.tensor([[-1.0, math.nan]]), None, "at most 0"),
    ],
)
def test_wrong_observed_gates_are_refused(g, token_mask, message):
    with pytest.raises(ValueError, match=message):
        empirical_horizons(g, token_mask)


# state magnitude


@given(
    lead=st.sampled_from([(), (2,), (2, 3)]),
    HV=st.integers(1, 3),
    V=st.integers(1, 4),
    K=st.integers(1, 5),
    seed=seeds,
)
def test_state_magnitude_is_eq_5_for_each_unit(lead, HV, V, K, seed):
    """Fault 25: d_k != d_v."""
    state = torch.randn(*lead, HV, V, K, generator=torch.Generator().manual_seed(seed))
    heads, channels = state_magnitude(state, "gdn"), state_magnitude(state, "kda")
    assert heads.shape == (*lead, HV)
    assert channels.shape == (*lead, HV * K)
    S = state.numpy().astype(np.float64)
    for h in range(HV):
        np.testing.assert_allclose(heads[..., h], np.sqrt((S[..., h, :, :] ** 2).sum(axis=(-2, -1))), rtol=1e-12)
        for k in range(K):
            expected = np.sqrt((S[..., h, :, k] ** 2).sum(axis=-1))
            np.testing.assert_allclose(channels[..., h * K + k], expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("state", "kind", "message"),
    [
        (torch.zeros(2, 2), "gdn", "state must be floating-point"),
        (torch.zeros(1, 2, 2, dtype=torch.int8), "kda", "state must be floating-point"),
        (torch.zeros(1, 2, 2), "mamba", "kind must be"),
    ],
)
def test_wrong_state_or_kind_is_refused(state, kind, message):
    with pytest.raises(ValueError, match=message):
        state_magnitude(state, kind)


# layerwise structure


@given(L=st.integers(1, 3), HV=st.integers(1, 4), K=st.integers(1, 5), seed=seeds, density=st.floats(0, 1))
def test_fractions_pairs_and_layer_means_match_counting_by_hand(L, HV, K, seed, density):
    mask = torch.rand(L, HV * K, generator=torch.Generator().manual_seed(seed)) < density
    fractions = retained_fractions(mask, geometry("kda", L, HV, K))
    kept = [[sum(mask[layer, h * K : (h + 1) * K].tolist()) for h in range(HV)] for layer in range(L)]
    assert fractions.tolist() == [[count / K for count in row] for row in kept]
    flat = [count for row in kept for count in row]
    expected = (sum(0 < count < K for count in flat), flat.count(0), flat.count(K))
    assert mixed_pairs(fractions) == expected
    layers = layer_fractions(fractions)
    torch.testing.assert_close(layers.mean, mask.double().mean(dim=1), rtol=1e-12, atol=0)
    assert (layers.lowest, layers.highest) == (layers.mean.min(), layers.mean.max())


def test_gdn_heads_are_kept_whole_or_not_at_all():
    mask = torch.tensor([[True, False, True], [False, False, False]])
    fractions = retained_fractions(mask, geometry("gdn", 2, 3, 5))
    assert fractions.tolist() == [[1, 0, 1], [0, 0, 0]]
    assert mixed_pairs(fractions) == (0, 4, 2)


def test_mask_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="mask must be"):
        retained_fractions(torch.ones(2, 3, dtype=torch.bool), geometry("kda", 2, 3, 5))
