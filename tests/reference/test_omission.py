"""An omission never hurts more than its bound says, and what the bound does not promise does fail."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dasc.reference import (
    omission_bound,
    omission_estimate,
    recurrent_gdn,
    recurrent_kda,
    remaining_share,
    settle_tokens,
)
from tests.inputs import REGIMES, DeltaRuleCase, delta_rule_cases


def states_after_each(case: DeltaRuleCase, inputs: dict[str, Tensor], state: Tensor) -> Tensor:
    """``[B, T + 1, HV, V, K]``."""
    run = recurrent_kda if case.channel_gate else recurrent_gdn
    states = [state]
    for t in range(case.T):
        token = {name: x[:, t : t + 1] for name, x in inputs.items()}
        states.append(run(**token, initial_state=states[-1]).final_state)
    return torch.stack(states, dim=1)


def excess(case: DeltaRuleCase, bound=omission_bound, omitted: float = 0.5) -> float:
    """Largest distance of two runs over ``bound``, in units of their own rounding; not above 1 where it holds."""
    inputs = case.build()
    full = inputs.pop("initial_state")
    generator = torch.Generator().manual_seed(case.seed)
    keep = torch.rand(case.HV, 1, case.K if case.channel_gate else 1, generator=generator) >= omitted
    kept = full * keep
    whole, partial = states_after_each(case, inputs, full), states_after_each(case, inputs, kept)
    difference = (whole - partial).norm(dim=(-2, -1))
    rounding = 1e-13 * whole.norm(dim=(-2, -1)).amax(dim=1, keepdim=True) + 1e-300
    return float(((difference - bound(full - kept, inputs["g"])) / rounding).max())


@given(delta_rule_cases(max_T=20, with_state=True))
def test_two_states_that_see_the_same_inputs_differ_by_no_more_than_the_bound(case: DeltaRuleCase):
    assert excess(case) <= 1


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("channel_gate", [False, True])
def test_the_bound_holds_in_every_regime(regime: str, channel_gate: bool):
    case = DeltaRuleCase(B=2, T=30, H=2, ratio=2, K=8, V=3, channel_gate=channel_gate, regime=regime, seed=5)
    assert excess(case) <= 1


def head_mean(error: Tensor, g: Tensor) -> Tensor:
    return omission_bound(error, g.mean(dim=-1))


def one_step_ahead(error: Tensor, g: Tensor) -> Tensor:
    bound = omission_bound(error, g)
    return torch.cat([bound[:, 1:], bound[:, -1:]], dim=1)


@pytest.mark.parametrize("wrong", [head_mean, one_step_ahead, omission_estimate])
def test_tighter_formulas_are_no_bounds_for_channels(wrong):
    """By the mean channel, a step too early, or channel by channel: each is violated, so the test above can fail."""
    cases = [
        DeltaRuleCase(B=1, T=20, H=1, ratio=1, K=5, V=2, channel_gate=True, regime="mixed", seed=seed)
        for seed in range(5)
    ]
    assert max(excess(case, wrong) for case in cases) > 1e6


def test_what_a_fast_channel_misses_can_stay_in_a_slow_one():
    """Two channels, the first forgets at once; a key between them carries the error over before it is gone."""
    error = torch.tensor([[[[1.0, 0.0]]]], dtype=torch.float64)
    k = torch.tensor([math.sqrt(0.5), math.sqrt(0.5)], dtype=torch.float64).expand(1, 3, 1, 2)
    g = torch.tensor([-1.0, 0.0], dtype=torch.float64).expand(1, 3, 1, 2)
    nothing = torch.zeros(1, 3, 1, 1, dtype=torch.float64)
    beta = torch.ones(1, 3, 1, dtype=torch.float64)
    left = recurrent_kda(k, k, nothing, g, beta, initial_state=error).final_state
    assert float(left.norm()) > 2 * float(omission_estimate(error, g)[0, -1, 0])
    assert float(left.norm()) <= float(omission_bound(error, g)[0, -1, 0])


@given(delta_rule_cases(max_T=12, with_state=True))
def test_without_writing_the_estimate_is_exact(case: DeltaRuleCase):
    inputs = case.build()
    state = inputs.pop("initial_state")
    inputs["beta"] = torch.zeros_like(inputs["beta"])
    inputs["v"] = torch.zeros_like(inputs["v"])
    left = states_after_each(case, inputs, state).norm(dim=(-2, -1))
    torch.testing.assert_close(left, omission_estimate(state, inputs["g"]), rtol=1e-10, atol=0)
    if not case.channel_gate:
        torch.testing.assert_close(left, omission_bound(state, inputs["g"]), rtol=1e-10, atol=0)


@given(st.integers(0, 2**31 - 1), st.integers(1, 40), st.sampled_from([1.0, 0.5, 0.1, 1e-3]))
def test_settling_is_the_first_token_within_the_tolerance(seed: int, units: int, tolerance: float):
    generator = torch.Generator().manual_seed(seed)
    horizons = 1 + 100 * torch.rand(2, units, generator=generator, dtype=torch.float64)
    mask = torch.rand(2, units, generator=generator) < 0.5
    tokens = settle_tokens(horizons, mask, tolerance)
    assert remaining_share(horizons, mask, tokens) <= tolerance
    assert tokens == 0 or remaining_share(horizons, mask, tokens - 1) > tolerance


def test_of_units_of_one_horizon_epsilon_is_left_after_it():
    horizons = torch.full((1, 3), 64.0, dtype=torch.float64)
    mask = torch.tensor([[True, False, False]])
    assert remaining_share(horizons, mask, 64) == pytest.approx(1e-3)
    assert remaining_share(horizons, mask, 32, epsilon=1e-2) == pytest.approx(1e-1)
    assert settle_tokens(horizons, mask, 1e-3) in (64, 65)  # by rounding
    assert settle_tokens(horizons, mask, 0.5) == math.ceil(64 * math.log(2) / math.log(1000))


def test_with_nothing_omitted_nothing_is_missing():
    horizons = torch.full((1, 3), math.inf, dtype=torch.float64)
    assert remaining_share(horizons, torch.ones(1, 3, dtype=torch.bool), 0) == 0
    assert settle_tokens(horizons, torch.ones(1, 3, dtype=torch.bool), 1e-3) == 0


def test_wrong_arguments_are_refused():
    error, g = torch.zeros(1, 2, 3, 4), torch.zeros(1, 5, 2)
    for wrong_error, wrong_g, message in (
        (error[0], g, "error must be floating-point"),
        (error, g[..., :1], "g must be floating-point"),
        (error, g[..., None].expand(1, 5, 2, 3), "g must be floating-point"),
        (error, g + 1, "at most 0"),
        (error, g * math.nan, "at most 0"),
    ):
        with pytest.raises(ValueError, match=message):
            omission_bound(wrong_error, wrong_g)
    horizons, mask = torch.ones(1, 2, dtype=torch.float64), torch.zeros(1, 2, dtype=torch.bool)
    for call, message in (
        (lambda: remaining_share(horizons.float(), mask, 0), "horizons must be float64"),
        (lambda: remaining_share(horizons, mask[:, :1], 0), "mask must be"),
        (lambda: remaining_share(horizons, mask, -1), "tokens must be >= 0"),
        (lambda: settle_tokens(horizons, mask, 0), "tolerance must be within"),
        (lambda: settle_tokens(horizons * math.inf, mask, 0.1), "never decays never settles"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
