"""The token-by-token oracle against eq. 1 written with matrices, against transformers, and against its own laws.

Faults 15, 16 and 18 are about who stores which state when; here they reduce to packed = per sequence and split = whole.
"""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from dasc.contract import DeltaRuleOutput
from dasc.reference.recurrent import recurrent_gdn, recurrent_kda
from tests.inputs import DeltaRuleCase, delta_rule_cases
from tests.reference.measures import assert_same, recurrent_of

BOTH = pytest.mark.parametrize("channel_gate", [False, True], ids=["gdn", "kda"])
PER_TOKEN = ("q", "k", "v", "g", "beta")
ROUNDING = 1e-12  # the same operations; torch's exp may differ in the last bit between lengths and strides


def cut(inputs, start, stop):
    """The same call on tokens ``start : stop`` only."""
    return {name: t[:, start:stop] if name in PER_TOKEN else t for name, t in inputs.items()}


def matrix_form(q, k, v, g, beta, initial_state=None):
    """Eq. 1 as the paper writes it, head by head and token by token."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    o = torch.zeros(B, T, HV, V, dtype=torch.float64)
    final = torch.zeros(B, HV, V, K, dtype=torch.float64)
    eye = torch.eye(K, dtype=torch.float64)
    for b in range(B):
        for h in range(HV):
            key_head = h // (HV // H)
            S = torch.zeros(V, K, dtype=torch.float64) if initial_state is None else initial_state[b, h]
            for t in range(T):
                k_t = k[b, t, key_head]
                erase = eye - beta[b, t, h] * torch.outer(k_t, k_t)
                alpha = torch.diag(g[b, t, h].exp().expand(K))
                S = S @ alpha @ erase + beta[b, t, h] * torch.outer(v[b, t, h], k_t)
                o[b, t, h] = S @ q[b, t, key_head] * K**-0.5
            final[b, h] = S
    return DeltaRuleOutput(o, final)


@given(delta_rule_cases(max_T=20))
def test_is_equation_1_with_value_head_h_reading_key_head_h_div_ratio(case):
    """Faults 25, 27."""
    inputs = case.build()
    assert_same(recurrent_of(case.channel_gate)(**inputs), matrix_form(**inputs), ROUNDING)


@pytest.mark.parametrize("l2norm", [False, True])
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_gdn_equals_transformers(ratio, l2norm):
    """Faults 25, 26: d_k != d_v, a non-zero initial state, 1, 2 and 4 value heads a key head."""
    x = DeltaRuleCase(2, 70, 2, ratio, 8, 5, False, seed=ratio).build(torch.float32)
    state = x.pop("initial_state")
    o, final = torch_recurrent_gated_delta_rule(
        *(x[name] for name in PER_TOKEN), state.mT, output_final_state=True, use_qk_l2norm_in_kernel=l2norm
    )
    got = recurrent_gdn(**x, initial_state=state, use_qk_l2norm=l2norm)
    assert_same(got, DeltaRuleOutput(o, final.mT), 1e-5)


@pytest.mark.parametrize("l2norm", [False, True])
def test_kda_equals_transformers(l2norm):
    """Fault 25."""
    x = DeltaRuleCase(2, 70, 3, 1, 8, 5, True, seed=1).build(torch.float32)
    state = x.pop("initial_state")
    o, final = recurrent_kimi_delta_attention(
        *(x[name] for name in PER_TOKEN), state.mT, True, use_qk_l2norm_in_kernel=l2norm
    )
    got = recurrent_kda(**x, initial_state=state, use_qk_l2norm=l2norm)
    assert_same(got, DeltaRuleOutput(o, final.mT), 1e-5)


@given(delta_rule_cases(max_T=20), st.integers(0, 20))
def test_splitting_anywhere_and_passing_the_state_changes_nothing(case, at):
    inputs, run = case.build(), recurrent_of(case.channel_gate)
    whole = run(**inputs)
    first = run(**cut(inputs, 0, at))
    second = run(**{**cut(inputs, at, None), "initial_state": first.final_state})
    assert_same(DeltaRuleOutput(torch.cat([first.o, second.o], dim=1), second.final_state), whole, ROUNDING)


@BOTH
@pytest.mark.parametrize("more", [1, 2, 3, 65])
def test_continuing_from_a_state_equals_the_sequential_run(channel_gate, more):
    """Fault 19."""
    x, run = DeltaRuleCase(1, 20 + more, 1, 2, 4, 3, channel_gate).build(), recurrent_of(channel_gate)
    state = run(**cut(x, 0, 20)).final_state
    whole = run(**x)
    continued = run(**{**cut(x, 20, None), "initial_state": state})
    assert_same(continued, DeltaRuleOutput(whole.o[:, 20:], whole.final_state), ROUNDING)


@given(st.lists(st.integers(0, 9), min_size=0, max_size=6), delta_rule_cases(B=1, T=0))
def test_packed_sequences_equal_runs_by_themselves(lengths, case):
    """Faults 15, 34: every sequence gets the state of its own boundary; an empty one passes its state through."""
    case = dataclasses.replace(case, T=sum(lengths), states=len(lengths))
    inputs, run = case.build(), recurrent_of(case.channel_gate)
    bounds = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    packed = run(**inputs, cu_seqlens=torch.tensor(bounds))
    assert packed.final_state.shape == (len(lengths), case.HV, case.V, case.K)
    for n, (start, stop) in enumerate(itertools.pairwise(bounds)):
        alone = cut(inputs, start, stop)
        if case.with_state:
            alone["initial_state"] = inputs["initial_state"][n : n + 1]
        own = DeltaRuleOutput(packed.o[:, start:stop], packed.final_state[n : n + 1])
        assert_same(own, run(**alone), ROUNDING)


@BOTH
def test_an_empty_sequence_keeps_its_state(channel_gate):
    """Fault 34."""
    inputs = DeltaRuleCase(1, 5, 1, 2, 4, 3, channel_gate, states=3).build()
    final = recurrent_of(channel_gate)(**inputs, cu_seqlens=torch.tensor([0, 0, 5, 5])).final_state
    assert torch.equal(final[0], inputs["initial_state"][0])
    assert not torch.equal(final[1], inputs["initial_state"][1])
    assert torch.equal(final[2], inputs["initial_state"][2])


@BOTH
def test_no_tokens_give_no_output_and_the_initial_state(channel_gate):
    inputs = DeltaRuleCase(2, 0, 1, 2, 4, 3, channel_gate).build()
    got = recurrent_of(channel_gate)(**inputs)
    assert got.o.shape == (2, 0, 2, 3)
    assert torch.equal(got.final_state, inputs["initial_state"])


@BOTH
@pytest.mark.parametrize("packed", [False, True])
def test_nan_stays_in_its_sequence(channel_gate, packed):
    inputs = DeltaRuleCase(1 if packed else 2, 8, 1, 2, 4, 3, channel_gate, states=2).build()
    cu_seqlens = torch.tensor([0, 4, 8]) if packed else None
    poisoned = {name: t.clone() for name, t in inputs.items()}
    for name, t in poisoned.items():
        if packed and name in PER_TOKEN:
            t[:, :4] = torch.nan
        else:
            t[0] = torch.nan
    clean = recurrent_of(channel_gate)(**inputs, cu_seqlens=cu_seqlens)
    got = recurrent_of(channel_gate)(**poisoned, cu_seqlens=cu_seqlens)
    other = (slice(None), slice(4, None)) if packed else (slice(1, None),)
    assert torch.equal(got.o[other], clean.o[other])
    assert torch.equal(got.final_state[1], clean.final_state[1])
    assert got.final_state[0].isnan().all()


@given(delta_rule_cases(max_T=12, B=1), st.integers(0, 11))
def test_later_tokens_do_not_change_earlier_outputs(case, at):
    inputs, run = case.build(), recurrent_of(case.channel_gate)
    before = run(**inputs).o[:, :at]
    for name in PER_TOKEN:
        inputs[name][:, at:] = inputs[name][:, at:] * 0.5 - 0.25
    assert torch.equal(run(**inputs).o[:, :at], before)


@given(delta_rule_cases(max_T=20, with_state=True))
def test_without_writing_the_state_only_decays(case):
    inputs = case.build()
    inputs["beta"] = torch.zeros_like(inputs["beta"])
    total = inputs["g"].sum(dim=1)
    decay = total.exp()[:, :, None, :] if case.channel_gate else total.exp()[:, :, None, None]
    final = recurrent_of(case.channel_gate)(**inputs).final_state
    torch.testing.assert_close(final, inputs["initial_state"] * decay, rtol=1e-11, atol=1e-250)


@given(delta_rule_cases(max_T=20, channel_gate=False))
def test_kda_with_one_decay_a_head_is_gdn(case):
    inputs = case.build()
    kda = recurrent_kda(**{**inputs, "g": inputs["g"].unsqueeze(-1).expand(*inputs["g"].shape, case.K)})
    assert_same(kda, recurrent_gdn(**inputs), ROUNDING)


@given(delta_rule_cases(max_T=20, with_state=True), st.floats(-2, 2))
def test_is_affine_in_values_and_initial_state(case, weight):
    one, run = case.build(), recurrent_of(case.channel_gate)
    two = dataclasses.replace(case, seed=case.seed + 1, regime="typical").build()
    parts = ("v", "initial_state")
    mixed = {**one, **{name: weight * one[name] + (1 - weight) * two[name] for name in parts}}
    a, b = run(**one), run(**{**one, **{name: two[name] for name in parts}})
    for got, x, y in zip(run(**mixed), a, b, strict=True):
        atol = 1e-12 * float(torch.cat([x.flatten(), y.flatten(), x.new_zeros(1)]).abs().max())
        torch.testing.assert_close(got, weight * x + (1 - weight) * y, rtol=1e-11, atol=atol)


@given(delta_rule_cases(max_T=12))
def test_strides_do_not_matter_and_inputs_are_not_written(case):
    """Fault 26."""
    inputs, run = case.build(), recurrent_of(case.channel_gate)
    permuted = {name: t.transpose(1, 2).contiguous().transpose(1, 2) for name, t in inputs.items()}
    spaced = {name: torch.stack([t, t + 1], dim=-1)[..., 0] for name, t in inputs.items()}
    originals = {name: t.clone() for name, t in inputs.items()}
    expected = run(**inputs)
    for other in (permuted, spaced):
        got = run(**other)
        assert_same(got, expected, ROUNDING)
        assert got.o.is_contiguous()
        assert got.final_state.is_contiguous()
        assert all(torch.equal(other[name], originals[name]) for name in inputs)
    assert all(torch.equal(inputs[name], originals[name]) for name in inputs)


@BOTH
def test_the_final_state_is_not_the_callers_tensor(channel_gate):
    inputs = DeltaRuleCase(1, 0, 1, 1, 2, 3, channel_gate).build()
    recurrent_of(channel_gate)(**inputs).final_state.zero_()
    assert inputs["initial_state"].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@BOTH
def test_output_has_the_dtype_of_v_and_the_state_the_compute_dtype(channel_gate, dtype):
    """Fault 24."""
    inputs = DeltaRuleCase(1, 3, 1, 1, 2, 3, channel_gate).build(dtype)
    got = recurrent_of(channel_gate)(**inputs)
    assert got.o.dtype == dtype
    assert got.final_state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    mixed = recurrent_of(channel_gate)(**{**inputs, "initial_state": inputs["initial_state"].double()})
    assert (mixed.o.dtype, mixed.final_state.dtype) == (dtype, torch.float64)


@BOTH
def test_half_precision_inputs_with_a_state_near_their_maximum_stay_finite(channel_gate):
    """Fault 35: the state leaves the range of FP16, whose numbers it was given."""
    inputs = DeltaRuleCase(1, 65, 1, 1, 4, 3, channel_gate, "zero_g").build(torch.float16)
    inputs["initial_state"] = torch.full_like(inputs["initial_state"], 65000.0)
    inputs["v"] = torch.full_like(inputs["v"], 60000.0)
    inputs["k"] = torch.ones_like(inputs["k"])
    inputs["beta"] = torch.full_like(inputs["beta"], 0.25)
    inputs["q"] = inputs["q"] * 1e-3
    got = recurrent_of(channel_gate)(**inputs)
    exact = recurrent_of(channel_gate)(**{name: t.double() for name, t in inputs.items()})
    assert got.o.isfinite().all()
    assert_same(DeltaRuleOutput(exact.o, got.final_state.double()), exact, 1e-5)


def test_a_decay_of_zero_forgets_a_channel_and_one_of_one_keeps_it():
    """Fault 33; g = -inf forgets the state exactly."""
    inputs = DeltaRuleCase(1, 6, 1, 1, 4, 3, True).build()
    inputs["g"] = torch.zeros_like(inputs["g"])
    inputs["g"][:, 3, :, 1] = -torch.inf
    inputs["beta"] = torch.zeros_like(inputs["beta"])
    expected = inputs["initial_state"].clone()
    expected[..., 1] = 0
    assert torch.equal(recurrent_kda(**inputs).final_state, expected)


@BOTH
def test_very_many_short_sequences(channel_gate):
    """Fault 35: 70,000 sequences of one token are one step. From zero, o = beta (k.q) v / sqrt(K)."""
    N = 70_000
    x = DeltaRuleCase(1, N, 1, 1, 2, 1, channel_gate, with_state=False).build(torch.float32)
    got = recurrent_of(channel_gate)(**x, cu_seqlens=torch.arange(N + 1))
    expected = x["beta"][..., None] * x["v"] * (x["q"] * x["k"]).sum(-1, keepdim=True) * 2**-0.5
    torch.testing.assert_close(got.o, expected)
    written = x["beta"][..., None, None] * x["v"].unsqueeze(-1) * x["k"].unsqueeze(-2)
    torch.testing.assert_close(got.final_state, written[0])


@BOTH
def test_scale_multiplies_q_and_defaults_to_the_root_of_k(channel_gate):
    inputs, run = DeltaRuleCase(1, 4, 1, 1, 4, 3, channel_gate).build(), recurrent_of(channel_gate)
    assert torch.equal(run(**inputs).o, run(**inputs, scale=0.5).o)
    torch.testing.assert_close(run(**inputs, scale=3.0).o, run(**{**inputs, "q": inputs["q"] * 6.0}).o)


@BOTH
def test_a_zero_key_normalises_to_zero(channel_gate):
    inputs = DeltaRuleCase(1, 4, 1, 1, 4, 3, channel_gate).build()
    inputs["q"], inputs["k"] = torch.zeros_like(inputs["q"]), torch.zeros_like(inputs["k"])
    inputs["g"] = torch.zeros_like(inputs["g"])
    got = recurrent_of(channel_gate)(**inputs, use_qk_l2norm=True)
    assert torch.equal(got.final_state, inputs["initial_state"])
    assert not got.o.any()


@BOTH
def test_autocast_does_not_reach_inside(channel_gate):
    inputs = DeltaRuleCase(1, 5, 1, 2, 8, 4, channel_gate).build(torch.float32)
    plain = recurrent_of(channel_gate)(**inputs, use_qk_l2norm=True)
    with torch.autocast("cpu", torch.bfloat16):
        cast = recurrent_of(channel_gate)(**inputs, use_qk_l2norm=True)
    assert torch.equal(cast.o, plain.o)
    assert torch.equal(cast.final_state, plain.final_state)


@BOTH
@pytest.mark.parametrize("bounds", [[0, 12, 8, 16], [1, 16], [0, 15], [0, 17], []])
def test_wrong_boundaries_are_refused_and_left_alone(channel_gate, bounds):
    """Fault 34."""
    inputs = DeltaRuleCase(1, 16, 1, 1, 2, 3, channel_gate, with_state=False).build()
    cu_seqlens = torch.tensor(bounds, dtype=torch.int64)
    with pytest.raises(ValueError, match="cu_seqlens"):
        recurrent_of(channel_gate)(**inputs, cu_seqlens=cu_seqlens)
    assert cu_seqlens.tolist() == bounds


@BOTH
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q", lambda t: t[0]),
        ("k", lambda t: t[..., :2]),
        ("v", lambda t: t[:, :, :3]),
        ("v", lambda t: t[:, :2]),
        ("g", lambda t: t[:, :, :1]),
        ("g", lambda t: t.unsqueeze(-1)),
        ("beta", lambda t: t.unsqueeze(-1)),
        ("beta", lambda t: t.long()),
        ("initial_state", lambda t: t.mT),
        ("initial_state", lambda t: t[:1]),
        ("q", lambda t: t.tolist()),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(channel_gate, name, change):
    inputs = DeltaRuleCase(2, 4, 2, 2, 4, 3, channel_gate).build()
    inputs[name] = change(inputs[name])
    with pytest.raises(ValueError, match=f"{name}|value heads"):
        recurrent_of(channel_gate)(**inputs)


@BOTH
def test_packed_sequences_need_a_batch_of_one_and_heads_a_dimension(channel_gate):
    two = DeltaRuleCase(2, 4, 1, 1, 2, 3, channel_gate, with_state=False).build()
    with pytest.raises(ValueError, match="B = 1"):
        recurrent_of(channel_gate)(**two, cu_seqlens=torch.tensor([0, 4]))
    flat = DeltaRuleCase(1, 4, 1, 1, 0, 3, channel_gate, with_state=False).build()
    with pytest.raises(ValueError, match="K = 0"):
        recurrent_of(channel_gate)(**flat)
