"""The CPU path against the reference recurrence, for prefill (``chunk_*``) and decode (``recurrent_*``) alike.

Faults 16 and 18 are about who stores which state when; here they reduce to packed = per sequence and split = whole.
"""

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from dasc import fast
from dasc.contract import DeltaRuleOutput
from dasc.fast.cpu import delta_rule, step
from tests.inputs import REGIMES, DeltaRuleCase, delta_rule_cases
from tests.reference.measures import FP32_EPS, assert_same, errors, recurrent_of

BOTH = pytest.mark.parametrize("channel_gate", [False, True], ids=["gdn", "kda"])
PER_TOKEN = ("q", "k", "v", "g", "beta")
LENGTHS = st.lists(st.one_of(st.sampled_from([0, 1, 2, 63, 64, 65, 130]), st.integers(0, 20)), max_size=8)


def chunk_of(channel_gate):
    return fast.chunk_kda if channel_gate else fast.chunk_gdn


def decode_of(channel_gate):
    return fast.recurrent_kda if channel_gate else fast.recurrent_gdn


def cut(inputs, start, stop):
    """The same call on tokens ``start : stop`` only."""
    return {name: t[:, start:stop] if name in PER_TOKEN else t for name, t in inputs.items()}


def bounds(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)])


def assert_within_budget(channel_gate, inputs, chunk_size=64, **options):
    """Per (sequence, head): at most twice the error of the plain FP32 recurrence against FP64, and a floor.

    The floor: a block of C tokens sums C updates where the recurrence holds at most K at a time, the delta rule having
    erased the others. With hardly any decay those sums cancel, so C / K roundings come on top.
    """
    exact = recurrent_of(channel_gate)(**{name: t.double() for name, t in inputs.items()}, **options)
    plain = recurrent_of(channel_gate)(**inputs, **options)
    got = chunk_of(channel_gate)(**inputs, **options, chunk_size=chunk_size)
    assert all(part.isfinite().all() for part in got)
    tokens = min(chunk_size, inputs["q"].shape[1])
    floor = FP32_EPS * max(1.0, tokens / inputs["q"].shape[-1])
    for part, of_chunk, of_plain in zip(got, errors(got, exact), errors(plain, exact), strict=True):
        if part.numel():
            excess = (of_chunk - 2 * of_plain - floor).max()
            assert excess <= 0, f"{excess / FP32_EPS:.2f} eps over the budget"


@given(delta_rule_cases(), st.one_of(st.sampled_from([1, 2, 16, 63, 64, 65, 100]), st.integers(1, 80)))
@example(DeltaRuleCase(1, 65, 1, 1, 2, 3, True, "fast"), 64)
def test_equals_the_recurrence_for_every_block_size(case, chunk_size):
    """Faults 25, 27, 33, 35."""
    inputs = case.build()
    got = chunk_of(case.channel_gate)(**inputs, chunk_size=chunk_size)
    assert_same(got, recurrent_of(case.channel_gate)(**inputs))


@given(delta_rule_cases())
def test_the_decode_functions_equal_the_recurrence(case):
    inputs = case.build()
    assert_same(decode_of(case.channel_gate)(**inputs), recurrent_of(case.channel_gate)(**inputs))


@pytest.mark.parametrize("regime", REGIMES)
@BOTH
def test_fp32_is_within_twice_the_error_of_the_fp32_recurrence(channel_gate, regime):
    for seed, chunk_size in ((0, 1), (1, 16), (2, 64), (3, 150)):
        inputs = DeltaRuleCase(2, 150, 1, 2, 16, 12, channel_gate, regime, seed).build(torch.float32)
        assert_within_budget(channel_gate, inputs, chunk_size)


@pytest.mark.parametrize("T", [0, 1, 63, 64, 65, 1000])
@BOTH
def test_lengths_around_the_block_size_and_long_ones(channel_gate, T):
    """Fault 35."""
    for regime in ("typical", "slow", "mixed"):
        case = DeltaRuleCase(1, T, 2, 1, 16, 12, channel_gate, regime, seed=T)
        assert_within_budget(channel_gate, case.build(torch.float32))
        inputs = case.build()
        assert_same(chunk_of(channel_gate)(**inputs), recurrent_of(channel_gate)(**inputs))


@BOTH
@pytest.mark.parametrize("g", [math.log(1e-12), -1.0, -2.5, -3.0, -5.0, -60.0, -1e4, -torch.inf, 0.0])
@pytest.mark.parametrize("chunk_size", [32, 64])
def test_any_constant_decay_is_finite_and_right(channel_gate, g, chunk_size):
    """Faults 31, 32, 33: nothing here takes the exponential of a positive number."""
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        inputs = DeltaRuleCase(1, 64, 1, 2, 8, 5, channel_gate).build(dtype)
        inputs["g"] = torch.full_like(inputs["g"], g)
        got = chunk_of(channel_gate)(**inputs, chunk_size=chunk_size)
        assert all(part.isfinite().all() for part in got)
        assert_same(got, recurrent_of(channel_gate)(**inputs), tolerance)


@pytest.mark.parametrize("fast_g", [-60.0, -1e4, -torch.inf])
@BOTH
def test_small_decays_keep_their_digits_beside_vast_ones(channel_gate, fast_g):
    """Fault 33: where sums of -60 and -1e-3 are subtracted from each other, the small one is gone."""
    inputs = DeltaRuleCase(1, 128, 1, 2, 8, 5, channel_gate).build(torch.float32)
    choice = torch.randint(8, inputs["g"].shape, generator=torch.Generator().manual_seed(1))
    inputs["g"] = torch.tensor([fast_g, 0.0, *[-1e-3] * 3, *[-0.3] * 3])[choice]
    assert_within_budget(channel_gate, inputs)
    inputs = {name: t.double() for name, t in inputs.items()}
    assert_same(chunk_of(channel_gate)(**inputs), recurrent_of(channel_gate)(**inputs))


@BOTH
def test_a_nan_decay_is_not_taken_for_a_vanishing_one(channel_gate):
    for T in (1, 40):
        inputs = DeltaRuleCase(1, T, 1, 1, 8, 5, channel_gate).build(torch.float32)
        inputs["g"][:, T // 2] = torch.nan
        assert chunk_of(channel_gate)(**inputs).final_state.isnan().all()


@given(LENGTHS, delta_rule_cases(B=1, T=0), st.sampled_from([1, 5, 64, 100]))
@example([130, 1, 0, 65, 64, 1], DeltaRuleCase(1, 0, 1, 2, 2, 3, True), 64)
def test_packed_sequences_equal_the_recurrence(lengths, case, chunk_size):
    """Faults 15, 34: each sequence, short or long, gets the outputs and the state of its own run."""
    case = dataclasses.replace(case, T=sum(lengths), states=len(lengths))
    inputs = case.build()
    got = chunk_of(case.channel_gate)(**inputs, cu_seqlens=bounds(lengths), chunk_size=chunk_size)
    assert_same(got, recurrent_of(case.channel_gate)(**inputs, cu_seqlens=bounds(lengths)))


@given(
    st.lists(st.one_of(st.integers(0, 1), st.integers(0, 70)), max_size=5),
    delta_rule_cases(B=1, T=0, H=3),
    st.sampled_from([1, 100, 1000, 10**5]),
)
def test_cutting_sequences_and_heads_into_groups_changes_nothing(lengths, case, elements):
    """Down to one sequence and one key head at a time; of states that take a single step, one by one."""
    case = dataclasses.replace(case, T=sum(lengths), states=len(lengths))
    inputs = case.build()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_rule, "GROUP_ELEMENTS", elements)
        patch.setattr(step, "STEP_ELEMENTS", elements)
        got = chunk_of(case.channel_gate)(**inputs, cu_seqlens=bounds(lengths))
    assert_same(got, recurrent_of(case.channel_gate)(**inputs, cu_seqlens=bounds(lengths)))


def test_states_of_a_ragged_batch_are_those_of_isolated_runs():
    """Fault 15: lengths 500, 700, 900 in blocks of 128."""
    inputs = DeltaRuleCase(1, 2100, 1, 1, 4, 3, True, "slow", with_state=False).build()
    packed = fast.chunk_kda(**inputs, cu_seqlens=bounds([500, 700, 900]), chunk_size=128)
    for n, (start, stop) in enumerate(((0, 500), (500, 1200), (1200, 2100))):
        own = DeltaRuleOutput(packed.o[:, start:stop], packed.final_state[n : n + 1])
        assert_same(own, recurrent_of(True)(**cut(inputs, start, stop)))


@given(delta_rule_cases(max_T=40), st.integers(0, 40), st.integers(1, 16))
def test_splitting_anywhere_and_passing_the_state_changes_nothing(case, at, chunk_size):
    inputs, run = case.build(), chunk_of(case.channel_gate)
    whole = run(**inputs, chunk_size=chunk_size)
    first = run(**cut(inputs, 0, at), chunk_size=chunk_size)
    second = run(**{**cut(inputs, at, None), "initial_state": first.final_state}, chunk_size=chunk_size)
    assert_same(DeltaRuleOutput(torch.cat([first.o, second.o], dim=1), second.final_state), whole)


@BOTH
@pytest.mark.parametrize("more", [1, 2, 3, 65])
def test_continuing_from_a_state_equals_the_sequential_run(channel_gate, more):
    """Fault 19: by decode as by prefill, no shortcut for one token taken for two."""
    x = DeltaRuleCase(1, 20 + more, 1, 2, 4, 3, channel_gate).build()
    whole = recurrent_of(channel_gate)(**x)
    state = chunk_of(channel_gate)(**cut(x, 0, 20)).final_state
    for run in (chunk_of(channel_gate), decode_of(channel_gate)):
        continued = run(**{**cut(x, 20, None), "initial_state": state})
        assert_same(continued, DeltaRuleOutput(whole.o[:, 20:], whole.final_state))


@BOTH
def test_an_empty_sequence_keeps_its_state(channel_gate):
    """Fault 34."""
    inputs = DeltaRuleCase(1, 5, 1, 2, 4, 3, channel_gate, states=3).build(torch.float32)
    final = chunk_of(channel_gate)(**inputs, cu_seqlens=torch.tensor([0, 0, 5, 5])).final_state
    assert torch.equal(final[0], inputs["initial_state"][0])
    assert not torch.equal(final[1], inputs["initial_state"][1])
    assert torch.equal(final[2], inputs["initial_state"][2])


@BOTH
@pytest.mark.parametrize("B", [0, 2])
def test_no_tokens_and_no_sequences_give_no_output_and_the_initial_state(channel_gate, B):
    inputs = DeltaRuleCase(B, 0, 1, 2, 4, 3, channel_gate).build()
    got = chunk_of(channel_gate)(**inputs)
    assert got.o.shape == (B, 0, 2, 3)
    assert torch.equal(got.final_state, inputs["initial_state"])
    assert got.final_state.data_ptr() != inputs["initial_state"].data_ptr() or B == 0


@BOTH
@pytest.mark.parametrize("lengths", [[4, 70, 0, 9, 1], [1, 1, 0, 1, 1]])
def test_nan_stays_in_its_sequence(channel_gate, lengths):
    """Also where sequences share a block, the shorter ones filled up, and where they are neighbours in memory."""
    inputs = DeltaRuleCase(1, sum(lengths), 1, 2, 4, 3, channel_gate, states=5).build(torch.float32)
    edges = bounds(lengths)
    clean = chunk_of(channel_gate)(**inputs, cu_seqlens=edges)
    for sick, (start, stop) in enumerate(itertools.pairwise(edges.tolist())):
        poisoned = {name: t.clone() for name, t in inputs.items()}
        for name, t in poisoned.items():
            if name in PER_TOKEN:
                t[:, start:stop] = torch.nan
        poisoned["initial_state"][sick] = torch.nan
        got = chunk_of(channel_gate)(**poisoned, cu_seqlens=edges)
        others = [n for n in range(5) if n != sick]
        assert torch.equal(got.final_state[others], clean.final_state[others])
        assert torch.equal(got.o[:, :start], clean.o[:, :start])
        assert torch.equal(got.o[:, stop:], clean.o[:, stop:])
        assert got.o[:, start:stop].isnan().all()
        assert got.final_state[sick].isnan().all()


@BOTH
def test_very_many_short_sequences_are_one_step(channel_gate, monkeypatch):
    """Fault 35: 70,000 sequences of one token."""
    N = 70_000
    inputs = DeltaRuleCase(1, N, 1, 1, 2, 1, channel_gate, with_state=False).build(torch.float32)
    taken = count_steps(monkeypatch)
    for run in (chunk_of(channel_gate), decode_of(channel_gate)):
        got = run(**inputs, cu_seqlens=torch.arange(N + 1))
        expected = recurrent_of(channel_gate)(**inputs, cu_seqlens=torch.arange(N + 1))
        torch.testing.assert_close(got.o, expected.o)
        torch.testing.assert_close(got.final_state, expected.final_state)
    assert taken == [N, N]


def count_steps(monkeypatch):
    """A list that grows by the number of sequences of each step."""
    taken, take = [], delta_rule.step
    monkeypatch.setattr(delta_rule, "step", lambda q, *args: taken.append(len(q)) or take(q, *args))
    return taken


@BOTH
def test_a_decode_step_of_a_batch_is_one_step(channel_gate, monkeypatch):
    inputs = DeltaRuleCase(50, 1, 2, 2, 8, 5, channel_gate).build()
    taken = count_steps(monkeypatch)
    assert_same(decode_of(channel_gate)(**inputs), recurrent_of(channel_gate)(**inputs))
    assert taken == [50]


@BOTH
def test_a_step_may_write_the_new_states_over_the_old(channel_gate):
    x = DeltaRuleCase(3, 1, 2, 2, 8, 5, channel_gate).build()
    expected, state = recurrent_of(channel_gate)(**x), x["initial_state"]
    o = step.step(*(x[name][:, 0] for name in PER_TOKEN), 8**-0.5, state, state)
    assert_same(DeltaRuleOutput(o.unsqueeze(1), state), expected)


@given(delta_rule_cases(max_T=12))
def test_strides_do_not_matter_and_inputs_are_not_written(case):
    """Fault 26."""
    inputs, run = case.build(), chunk_of(case.channel_gate)
    permuted = {name: t.transpose(1, 2).contiguous().transpose(1, 2) for name, t in inputs.items()}
    spaced = {name: torch.stack([t, t + 1], dim=-1)[..., 0] for name, t in inputs.items()}
    originals = {name: t.clone() for name, t in inputs.items()}
    expected = run(**inputs)
    for other in (permuted, spaced):
        got = run(**other)
        assert_same(got, expected)
        assert got.o.is_contiguous()
        assert got.final_state.is_contiguous()
        assert all(torch.equal(other[name], originals[name]) for name in inputs)
    assert all(torch.equal(inputs[name], originals[name]) for name in inputs)


@BOTH
def test_one_long_sequence_is_read_in_place_and_not_written(channel_gate):
    """Whole blocks of a single sequence are views of the inputs."""
    inputs = DeltaRuleCase(1, 128, 2, 1, 8, 8, channel_gate).build(torch.float32)
    originals = {name: t.clone() for name, t in inputs.items()}
    chunk_of(channel_gate)(**inputs, use_qk_l2norm=True)
    assert all(torch.equal(inputs[name], originals[name]) for name in inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@BOTH
def test_output_has_the_dtype_of_v_and_the_state_the_compute_dtype(channel_gate, dtype):
    """Fault 24; computing in FP32 from FP16 or BF16 loses nothing but the rounding of ``o``."""
    for lengths in ([70], [70, 3]):
        case = DeltaRuleCase(1, sum(lengths), 1, 2, 4, 3, channel_gate, states=len(lengths))
        inputs = case.build(dtype)
        got = chunk_of(channel_gate)(**inputs, cu_seqlens=bounds(lengths))
        assert got.o.dtype == dtype
        assert got.final_state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        exact = recurrent_of(channel_gate)(
            **{name: t.double() for name, t in inputs.items()}, cu_seqlens=bounds(lengths)
        )
        torch.testing.assert_close(got.final_state.double(), exact.final_state, rtol=1e-5, atol=1e-5)
        eps = max(torch.finfo(dtype).eps, 1e-5)
        torch.testing.assert_close(got.o.double(), exact.o, rtol=eps, atol=eps)


@BOTH
def test_half_precision_inputs_with_a_state_near_their_maximum_stay_finite(channel_gate):
    """Fault 35: the state leaves the range of FP16, whose numbers it was given."""
    inputs = DeltaRuleCase(1, 65, 1, 1, 4, 3, channel_gate, "zero_g").build(torch.float16)
    inputs["initial_state"] = torch.full_like(inputs["initial_state"], 65000.0)
    inputs["v"] = torch.full_like(inputs["v"], 60000.0)
    inputs["q"] = inputs["q"] * 1e-3
    got = chunk_of(channel_gate)(**inputs)
    exact = recurrent_of(channel_gate)(**{name: t.double() for name, t in inputs.items()})
    assert got.o.isfinite().all()
    assert_same(DeltaRuleOutput(exact.o, got.final_state.double()), exact, 1e-5)


@BOTH
@pytest.mark.parametrize("T", [1, 20])
def test_scale_and_normalisation_are_those_of_the_recurrence(channel_gate, T):
    inputs = DeltaRuleCase(1, T, 1, 2, 8, 4, channel_gate, "zero_keys").build()
    inputs["k"] = inputs["k"] * 3
    for options in ({"scale": 3.0}, {"use_qk_l2norm": True}, {"use_qk_l2norm": True, "scale": 0.5}):
        assert_same(chunk_of(channel_gate)(**inputs, **options), recurrent_of(channel_gate)(**inputs, **options))


@BOTH
def test_autocast_and_gradients_do_not_reach_inside(channel_gate):
    inputs = DeltaRuleCase(1, 20, 1, 2, 8, 4, channel_gate).build(torch.float32)
    plain = chunk_of(channel_gate)(**inputs)
    inputs["v"].requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        cast = chunk_of(channel_gate)(**inputs)
    for got, expected in zip(cast, plain, strict=True):
        assert torch.equal(got, expected)
        assert not got.requires_grad


@BOTH
@pytest.mark.parametrize("edges", [[0, 12, 8, 16], [1, 16], [0, 15], [0, 17], []])
def test_wrong_boundaries_are_refused_and_left_alone(channel_gate, edges):
    """Fault 34."""
    inputs = DeltaRuleCase(1, 16, 1, 1, 2, 3, channel_gate, with_state=False).build()
    cu_seqlens = torch.tensor(edges, dtype=torch.int64)
    for run in (chunk_of(channel_gate), decode_of(channel_gate)):
        with pytest.raises(ValueError, match="cu_seqlens"):
            run(**inputs, cu_seqlens=cu_seqlens)
    assert cu_seqlens.tolist() == edges


@BOTH
@pytest.mark.parametrize("name", [*PER_TOKEN, "initial_state"])
def test_arguments_that_do_not_fit_are_refused_by_name(channel_gate, name):
    """The contract's own tests have every case; this one shows that it is asked."""
    inputs = DeltaRuleCase(2, 4, 2, 2, 4, 3, channel_gate).build()
    for wrong in (inputs[name].tolist(), inputs[name][:1, ..., :1]):
        with pytest.raises(ValueError, match=f"{name}|k must be"):
            chunk_of(channel_gate)(**{**inputs, name: wrong})


@BOTH
@pytest.mark.parametrize("chunk_size", [0, -1, 2.0])
def test_a_block_has_at_least_one_token(channel_gate, chunk_size):
    inputs = DeltaRuleCase(1, 4, 1, 1, 2, 3, channel_gate).build()
    with pytest.raises(ValueError, match="chunk_size"):
        chunk_of(channel_gate)(**inputs, chunk_size=chunk_size)


@pytest.mark.parametrize("regime", ["typical", "mixed", "zero_keys"])
@BOTH
def test_is_no_less_exact_than_transformers_at_the_size_of_models(channel_gate, regime):
    """Worst (sequence, head) against FP64, K = V = 128. Where hardly anything decays the two are level."""
    x = DeltaRuleCase(1, 130, 2, 1, 128, 128, channel_gate, regime).build(torch.float32)
    exact = recurrent_of(channel_gate)(**{name: t.double() for name, t in x.items()})
    peer = chunk_kimi_delta_attention if channel_gate else torch_chunk_gated_delta_rule
    per_token = [x[name] for name in PER_TOKEN]
    o, final = peer(*per_token, initial_state=x["initial_state"].mT.contiguous(), output_final_state=True)
    ours, theirs = errors(chunk_of(channel_gate)(**x), exact), errors(DeltaRuleOutput(o, final.mT), exact)
    for part in range(2):
        assert ours[part].max() <= theirs[part].max().clamp(min=FP32_EPS)  # less than a rounding is as good as none
