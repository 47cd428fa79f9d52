"""The blockwise form against the recurrence: the same numbers for every block size, length, gate and packing."""

import dataclasses
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from dasc.contract import DeltaRuleOutput
from dasc.reference.chunk import chunk_gdn, chunk_kda
from tests.inputs import REGIMES, DeltaRuleCase, delta_rule_cases
from tests.reference.measures import FP32_EPS, assert_same, chunk_of, errors, recurrent_of

BOTH = pytest.mark.parametrize("channel_gate", [False, True], ids=["gdn", "kda"])
PER_TOKEN = ("q", "k", "v", "g", "beta")


@given(delta_rule_cases(), st.one_of(st.sampled_from([1, 2, 16, 63, 64, 65, 100]), st.integers(1, 80)))
@example(DeltaRuleCase(1, 65, 1, 1, 2, 3, True, "fast"), 64)
def test_equals_the_recurrence_for_every_block_size(case, chunk_size):
    """Faults 25, 27, 33, 35."""
    inputs = case.build()
    got = chunk_of(case.channel_gate)(**inputs, chunk_size=chunk_size)
    assert_same(got, recurrent_of(case.channel_gate)(**inputs))


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


@BOTH
def test_mixed_decays_down_to_zero_equal_the_recurrence(channel_gate):
    """Fault 33: -inf, 0 and ordinary decays beside one another."""
    inputs = DeltaRuleCase(1, 40, 1, 2, 8, 5, channel_gate).build()
    choice = torch.randint(4, inputs["g"].shape, generator=torch.Generator().manual_seed(1))
    inputs["g"] = torch.tensor([0.0, -1e-3, -60.0, -torch.inf], dtype=torch.float64)[choice]
    assert_same(chunk_of(channel_gate)(**inputs, chunk_size=16), recurrent_of(channel_gate)(**inputs))


@pytest.mark.parametrize("regime", REGIMES)
@BOTH
def test_fp32_is_within_twice_the_error_of_the_fp32_recurrence(channel_gate, regime):
    """Per (sequence, head) against FP64.

    The floor: a block of C tokens sums C updates where the recurrence holds at most K at a time, the delta rule having
    erased the others. With hardly any decay those sums cancel, so C / K roundings come on top.
    """
    for seed, chunk_size in ((0, 1), (1, 16), (2, 64), (3, 150)):
        case = DeltaRuleCase(2, 150, 1, 2, 16, 12, channel_gate, regime, seed)
        inputs = case.build(torch.float32)
        exact = recurrent_of(channel_gate)(**{name: t.double() for name, t in inputs.items()})
        chunk = chunk_of(channel_gate)(**inputs, chunk_size=chunk_size)
        plain = recurrent_of(channel_gate)(**inputs)
        floor = FP32_EPS * max(1.0, chunk_size / case.K)
        assert all(part.isfinite().all() for part in chunk)
        for of_chunk, of_plain in zip(errors(chunk, exact), errors(plain, exact), strict=True):
            excess = (of_chunk - 2 * of_plain - floor).max()
            assert excess <= 0, f"seed {seed}, block {chunk_size}: {excess / FP32_EPS:.2f} eps over the budget"


@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_gdn_equals_transformers(ratio):
    """Faults 25, 26."""
    x = DeltaRuleCase(2, 70, 2, ratio, 8, 5, False, seed=ratio).build(torch.float32)
    state = x.pop("initial_state")
    o, final = torch_chunk_gated_delta_rule(
        *(x[name] for name in PER_TOKEN),
        initial_state=state.mT,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    got = chunk_gdn(**x, initial_state=state, use_qk_l2norm=True)
    assert_same(got, DeltaRuleOutput(o, final.mT), 1e-5)


def test_kda_equals_transformers():
    """Fault 25."""
    x = DeltaRuleCase(2, 70, 3, 1, 8, 5, True, seed=1).build(torch.float32)
    state = x.pop("initial_state")
    o, final = chunk_kimi_delta_attention(
        *(x[name] for name in PER_TOKEN),
        initial_state=state.mT,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    got = chunk_kda(**x, initial_state=state, use_qk_l2norm=True)
    assert_same(got, DeltaRuleOutput(o, final.mT), 1e-5)


@given(st.lists(st.integers(0, 20), min_size=0, max_size=6), delta_rule_cases(B=1, T=0), st.integers(1, 16))
def test_packed_sequences_equal_the_recurrence(lengths, case, chunk_size):
    """Fault 34."""
    case = dataclasses.replace(case, T=sum(lengths), states=len(lengths))
    inputs = case.build()
    cu_seqlens = torch.tensor([sum(lengths[:n]) for n in range(len(lengths) + 1)])
    got = chunk_of(case.channel_gate)(**inputs, cu_seqlens=cu_seqlens, chunk_size=chunk_size)
    assert_same(got, recurrent_of(case.channel_gate)(**inputs, cu_seqlens=cu_seqlens))


def test_states_of_a_ragged_batch_are_those_of_isolated_runs():
    """Fault 15: lengths 500, 700, 900 in blocks of 128."""
    case = DeltaRuleCase(1, 2100, 1, 1, 4, 3, True, "slow", with_state=False)
    inputs = case.build()
    packed = chunk_kda(**inputs, cu_seqlens=torch.tensor([0, 500, 1200, 2100]), chunk_size=128)
    for n, (start, stop) in enumerate(((0, 500), (500, 1200), (1200, 2100))):
        alone = recurrent_of(True)(**{name: t[:, start:stop] for name, t in inputs.items()})
        assert_same(DeltaRuleOutput(packed.o[:, start:stop], packed.final_state[n : n + 1]), alone)


@given(delta_rule_cases(max_T=40), st.integers(0, 40), st.integers(1, 16))
def test_splitting_off_the_block_boundary_changes_nothing(case, at, chunk_size):
    inputs, run = case.build(), chunk_of(case.channel_gate)
    whole = run(**inputs, chunk_size=chunk_size)
    first = run(**{name: t[:, :at] if name in PER_TOKEN else t for name, t in inputs.items()}, chunk_size=chunk_size)
    rest = {name: t[:, at:] for name, t in inputs.items() if name in PER_TOKEN}
    second = run(**rest, initial_state=first.final_state, chunk_size=chunk_size)
    assert_same(DeltaRuleOutput(torch.cat([first.o, second.o], dim=1), second.final_state), whole)


@BOTH
def test_nan_stays_in_its_sequence(channel_gate):
    inputs = DeltaRuleCase(1, 9, 1, 2, 4, 3, channel_gate, states=2).build()
    cu_seqlens = torch.tensor([0, 4, 9])
    poisoned = {name: t.clone() for name, t in inputs.items()}
    for name, t in poisoned.items():
        if name in PER_TOKEN:
            t[:, :4] = torch.nan
    clean = chunk_of(channel_gate)(**inputs, cu_seqlens=cu_seqlens, chunk_size=3)
    got = chunk_of(channel_gate)(**poisoned, cu_seqlens=cu_seqlens, chunk_size=3)
    assert torch.equal(got.o[:, 4:], clean.o[:, 4:])
    assert torch.equal(got.final_state[1], clean.final_state[1])


@given(delta_rule_cases(max_T=20, B=1), st.integers(0, 19))
def test_later_tokens_do_not_change_earlier_outputs(case, at):
    inputs, run = case.build(), chunk_of(case.channel_gate)
    before = run(**inputs, chunk_size=8).o[:, :at]
    for name in PER_TOKEN:
        inputs[name][:, at:] = inputs[name][:, at:] * 0.5 - 0.25
    torch.testing.assert_close(run(**inputs, chunk_size=8).o[:, :at], before, rtol=1e-12, atol=1e-14)


@given(delta_rule_cases(max_T=12))
def test_strides_do_not_matter_and_inputs_are_not_written(case):
    """Fault 26."""
    inputs, run = case.build(), chunk_of(case.channel_gate)
    permuted = {name: t.transpose(1, 2).contiguous().transpose(1, 2) for name, t in inputs.items()}
    originals = {name: t.clone() for name, t in inputs.items()}
    assert_same(run(**permuted), run(**inputs))
    for name, original in originals.items():
        assert torch.equal(inputs[name], original)
        assert torch.equal(permuted[name], original)


@BOTH
def test_very_many_short_sequences(channel_gate):
    """Fault 35."""
    N = 70_000
    inputs = DeltaRuleCase(1, N, 1, 1, 2, 1, channel_gate, with_state=False).build(torch.float32)
    cu_seqlens = torch.arange(N + 1)
    got = chunk_of(channel_gate)(**inputs, cu_seqlens=cu_seqlens)
    expected = recurrent_of(channel_gate)(**inputs, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(got.o, expected.o)
    torch.testing.assert_close(got.final_state, expected.final_state)


@BOTH
def test_half_precision_inputs_with_a_state_near_their_maximum_stay_finite(channel_gate):
    """Fault 35."""
    inputs = DeltaRuleCase(1, 65, 1, 1, 4, 3, channel_gate, "zero_g").build(torch.float16)
    inputs["initial_state"] = torch.full_like(inputs["initial_state"], 65000.0)
    inputs["v"] = torch.full_like(inputs["v"], 60000.0)
    inputs["q"] = inputs["q"] * 1e-3
    got = chunk_of(channel_gate)(**inputs)
    exact = recurrent_of(channel_gate)(**{name: t.double() for name, t in inputs.items()})
    assert got.o.isfinite().all()
    assert got.final_state.dtype == torch.float32
    assert_same(DeltaRuleOutput(exact.o, got.final_state.double()), exact, 1e-5)


@BOTH
def test_autocast_does_not_reach_inside(channel_gate):
    inputs = DeltaRuleCase(1, 20, 1, 2, 8, 4, channel_gate).build(torch.float32)
    plain = chunk_of(channel_gate)(**inputs, chunk_size=8)
    with torch.autocast("cpu", torch.bfloat16):
        cast = chunk_of(channel_gate)(**inputs, chunk_size=8)
    assert torch.equal(cast.o, plain.o)
    assert torch.equal(cast.final_state, plain.final_state)


@BOTH
@pytest.mark.parametrize("chunk_size", [0, -1, 2.0])
def test_a_block_has_at_least_one_token(channel_gate, chunk_size):
    inputs = DeltaRuleCase(1, 4, 1, 1, 2, 3, channel_gate).build()
    with pytest.raises(ValueError, match="chunk_size"):
        chunk_of(channel_gate)(**inputs, chunk_size=chunk_size)


@BOTH
def test_wrong_boundaries_are_refused(channel_gate):
    """Fault 34."""
    inputs = DeltaRuleCase(1, 16, 1, 1, 2, 3, channel_gate, with_state=False).build()
    with pytest.raises(ValueError, match="cu_seqlens"):
        chunk_of(channel_gate)(**inputs, cu_seqlens=torch.tensor([0, 12, 8, 16]))
