import math
import warnings

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st

from dasc.models.gate_parameters import GateParameters
from dasc.reference.horizons import static_horizons
from dasc.reference.statistics import (
    average_ranks,
    calibrate_gate_input,
    median_iqr,
    spearman,
    within_layer_spearman,
)

seeds = st.integers(0, 2**31 - 1)


@st.composite
def samples(draw):
    """Two samples with ties, infinities and now and then a constant."""
    size = draw(st.integers(2, 12))
    values = draw(
        st.sampled_from([[0.0, 1.0, 2.0], [0.0, -0.0, math.inf, -math.inf], [5.0], list(np.linspace(0, 1, 40))])
    )
    gen = np.random.default_rng(draw(seeds))
    return torch.from_numpy(gen.choice(values, size=size)), torch.from_numpy(gen.choice(values, size=size))


@given(samples())
def test_ranks_equal_those_of_scipy(case):
    for x in case:
        np.testing.assert_array_equal(average_ranks(x), scipy.stats.rankdata(x.numpy()))


@given(samples())
def test_spearman_equals_that_of_scipy_with_ties_infinities_and_constants(case):
    x, y = case
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", scipy.stats.ConstantInputWarning)
        expected = scipy.stats.spearmanr(x.numpy(), y.numpy()).statistic
    np.testing.assert_allclose(spearman(x, y), expected, rtol=1e-12, atol=1e-14)


@given(samples())
def test_spearman_is_symmetric_and_unmoved_by_increasing_maps(case):
    x, y = case
    rho = spearman(x, y)
    torch.testing.assert_close(spearman(y, x), rho, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(spearman(3 * x + 1, y), rho, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(spearman(-x, y), -rho, rtol=0, atol=0, equal_nan=True)


@given(n=st.integers(2, 300), seed=seeds)
def test_same_and_reversed_order_are_exactly_plus_and_minus_one(n, seed):
    x = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).double()
    assert spearman(x, x.exp()).item() == 1.0
    assert spearman(x, -x).item() == -1.0


@given(P=st.integers(1, 3), L=st.integers(1, 3), U=st.integers(2, 9), seed=seeds)
def test_within_layer_spearman_never_pools_layers(P, L, U, seed):
    gen = torch.Generator().manual_seed(seed)
    # layer scales far apart would dominate a pooled correlation
    scale = 10.0 ** torch.arange(L)[:, None]
    static = torch.rand(L, U, generator=gen, dtype=torch.float64) * scale
    observed = torch.rand(P, L, U, generator=gen, dtype=torch.float64) * scale
    rho = within_layer_spearman(static, observed)
    assert rho.shape == (P, L)
    for p in range(P):
        for layer in range(L):
            expected = scipy.stats.spearmanr(static[layer].numpy(), observed[p, layer].numpy()).statistic
            assert rho[p, layer].item() == pytest.approx(expected, rel=1e-12, abs=1e-14)


def test_strided_input_gives_the_same_ranks():
    """Fault 26."""
    x = torch.rand(5, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(average_ranks(x.T), average_ranks(x.T.contiguous()))


def test_wrong_samples_are_refused():
    with pytest.raises(ValueError, match="equally many units"):
        spearman(torch.zeros(3), torch.zeros(4))
    with pytest.raises(ValueError, match="must not be NaN"):
        spearman(torch.tensor([1.0, math.nan]), torch.zeros(2))
    with pytest.raises(ValueError, match="static must be"):
        within_layer_spearman(torch.zeros(2, 3), torch.zeros(1, 3, 3))


@given(n=st.integers(1, 20), missing=st.integers(0, 5), seed=seeds)
def test_median_and_quartiles_leave_nan_out_and_count_it(n, missing, seed):
    gen = np.random.default_rng(seed)
    values = np.concatenate([gen.normal(size=n), np.full(missing, np.nan)])
    gen.shuffle(values)
    summary = median_iqr(torch.from_numpy(values))
    np.testing.assert_allclose(summary[:3], np.nanpercentile(values, [50, 25, 75]), rtol=1e-12)
    assert summary.ignored == missing


@pytest.mark.parametrize("values", [[], [math.nan, math.nan], [0.5, math.inf]])
def test_values_without_a_median_are_refused(values):
    with pytest.raises(ValueError, match="values must hold finite numbers"):
        median_iqr(torch.tensor(values))


# calibration


def gate_parameters(seed: int = 0, gate: str = "softplus") -> GateParameters:
    gen = torch.Generator().manual_seed(seed)
    A_log = torch.randn(2, 3, generator=gen, dtype=torch.float64)
    dt_bias = torch.randn(2, 3, 4, generator=gen, dtype=torch.float64)
    return GateParameters(gate, -5.0 if gate == "safe" else None, A_log, dt_bias)


CANDIDATES = (1.5, -0.3, 0.8, -2.0)


@given(seed=seeds, gate=st.sampled_from(["softplus", "safe"]), truth=st.sampled_from(CANDIDATES), P=st.integers(2, 5))
def test_calibration_finds_the_gate_input_that_made_the_horizons(seed, gate, truth, P):
    params = gate_parameters(seed, gate)
    observed = static_horizons(params, truth).expand(P, -1, -1)
    result = calibrate_gate_input(params, observed, CANDIDATES)
    assert result.gate_input == truth
    assert result.objective[CANDIDATES.index(truth)] == 0.0
    assert result.validation == (1.0, 1.0, 1.0, 0)


@given(seed=seeds, P=st.integers(2, 5), truth=st.sampled_from(CANDIDATES))
def test_even_prefixes_choose_and_odd_ones_validate(seed, P, truth):
    params = gate_parameters(seed)
    noise = torch.rand(P, 2, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5
    observed = static_horizons(params, truth) * noise
    result = calibrate_gate_input(params, observed, CANDIDATES)
    other_odd = observed.clone()
    other_odd[1::2] = 7.0 / observed[1::2]
    assert calibrate_gate_input(params, other_odd, CANDIDATES)[:2] == result[:2]
    chosen = static_horizons(params, result.gate_input)
    assert result.validation == median_iqr(within_layer_spearman(chosen, observed[1::2]))


def test_objective_is_the_median_absolute_log_ratio():
    params = gate_parameters()
    static = static_horizons(params, 0.0)
    factors = torch.ones(2, 12, dtype=torch.float64)
    factors[0, :9] = 4.0  # 9 of 24 units too short, 5 too long
    factors[1, :5] = 1 / 4
    observed = (static * factors).expand(2, -1, -1)
    assert calibrate_gate_input(params, observed, [0.0]).objective == pytest.approx((math.log(4),), rel=1e-12)


def test_equal_candidates_are_settled_for_the_smaller_gate_input():
    """A larger gate input means a shorter horizon: the cautious choice is the smaller."""
    params = gate_parameters()
    never_decays = GateParameters("softplus", None, params.A_log, params.dt_bias - 2000)
    infinite = torch.full((2, 2, 12), math.inf, dtype=torch.float64)
    with pytest.raises(ValueError, match="values must hold finite numbers"):  # no ranking to validate
        calibrate_gate_input(never_decays, infinite, CANDIDATES)
    infinite[1] = torch.rand(2, 12, generator=torch.Generator().manual_seed(0))
    mixed = never_decays.dt_bias.clone()
    mixed[..., 0] = params.dt_bias[..., 0]  # enough units to rank, too few to move the median
    result = calibrate_gate_input(GateParameters("softplus", None, params.A_log, mixed), infinite, CANDIDATES)
    assert result.objective == (0.0, 0.0, 0.0, 0.0)
    assert result.gate_input == -2.0


@pytest.mark.parametrize(
    ("observed", "candidates", "message"),
    [
        (torch.ones(1, 2, 12).double(), [0.0], "P >= 2"),
        (torch.ones(2, 2, 12), [0.0], "must be float64"),
        (torch.ones(2, 24).double(), [0.0], r"\[P, L, U\]"),
        (torch.zeros(2, 2, 12).double(), [0.0], "must be positive"),
        (torch.full((2, 2, 12), math.nan).double(), [0.0], "must be positive"),
        (torch.ones(2, 2, 11).double(), [0.0], "observed_horizons must"),
        (torch.ones(2, 2, 12).double(), [], "candidates must hold"),
        (torch.ones(2, 2, 12).double(), [math.nan], "gate_input must be finite"),
    ],
)
def test_wrong_calibration_arguments_are_refused(observed, candidates, message):
    with pytest.raises(ValueError, match=message):
        calibrate_gate_input(gate_parameters(), observed, candidates)
