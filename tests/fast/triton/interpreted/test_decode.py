"""Decode and the token-by-token recurrences, interpreted, against the reference in FP64.

The budget: per (sequence, head) at most twice the error that the reference itself has in the kernel's precision.
"""

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from dasc import reference
from dasc.contract import DecayGate
from dasc.fast.triton import decode
from tests.inputs import REGIMES, DeltaRuleCase, delta_rule_cases
from tests.pooled_inputs import PooledCase, in_fp64, in_other_order
from tests.reference.measures import FP32_EPS, assert_budget, recurrent_of

BOTH = pytest.mark.parametrize("channel_gate", [False, True], ids=["gdn", "kda"])
PER_TOKEN = ("q", "k", "v", "g", "beta")
# 40 and 11: several groups of K and blocks of V, the last one not full
SIZES = {"K": st.sampled_from([1, 5, 8, 40]), "V": st.sampled_from([1, 3, 8, 11])}
# a program takes the interpreter some 10 ms: few examples, and no search for smaller ones
FEW = settings(max_examples=20, phases=[Phase.explicit, Phase.generate])


def triton_recurrent(channel_gate):
    return decode.recurrent_kda if channel_gate else decode.recurrent_gdn


def triton_decode(channel_gate):
    return decode.decode_kda if channel_gate else decode.decode_gdn


def reference_decode(channel_gate):
    return reference.decode_kda if channel_gate else reference.decode_gdn


def assert_recurrent_within_budget(channel_gate, inputs, **options):
    exact = recurrent_of(channel_gate)(**in_fp64(inputs), **options)
    plain = recurrent_of(channel_gate)(**inputs, **options)
    got = triton_recurrent(channel_gate)(**inputs, **options)
    assert_budget(got.o, plain.o, exact.o, (1, 3), 2 * FP32_EPS)
    assert_budget(got.final_state, plain.final_state, exact.final_state, (2, 3), 2 * FP32_EPS)


def decode_inputs(case, dtype=torch.float32, pool_dtype=torch.float32):
    x = case.build(dtype, pool_dtype)
    x.pop("cu_seqlens")
    for name in PER_TOKEN:
        x[name] = x[name].transpose(0, 1)
    return x


def assert_decode_within_budget(channel_gate, x, **options):
    """Outputs and slots; what no index names stays bit-identical."""
    pools = [in_fp64(x)["pool"], x["pool"].clone(), x["pool"].clone(memory_format=torch.preserve_format)]
    exact = reference_decode(channel_gate)(**dict(in_fp64(x), pool=pools[0]), **options)
    plain = reference_decode(channel_gate)(**dict(x, pool=pools[1]), **options)
    got = triton_decode(channel_gate)(**dict(x, pool=pools[2]), **options)
    assert_budget(got, plain, exact, (1, 3), 2 * FP32_EPS)
    slots = x["state_indices"][x["state_indices"] >= 0]
    exact, plain, got = (pool[slots] for pool in pools)
    assert_budget(got, plain, exact, (2, 3), 2 * FP32_EPS)
    others = [s for s in range(len(x["pool"])) if s not in slots.tolist()]
    assert torch.equal(bits(pools[2][others]), bits(x["pool"][others]))


def bits(t):
    return t.reshape(-1).contiguous().view(torch.uint8)


def bounds(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)])


@FEW
@given(st.data(), st.sampled_from([torch.float32, torch.float16]), st.booleans())
def test_recurrent_is_within_twice_the_error_of_the_reference(data, dtype, l2norm):
    """Faults 24, 25, 26, 27."""
    case = data.draw(delta_rule_cases(max_T=3, K=data.draw(SIZES["K"]), V=data.draw(SIZES["V"])))
    assert_recurrent_within_budget(case.channel_gate, case.build(dtype), use_qk_l2norm=l2norm)


@pytest.mark.parametrize("regime", REGIMES)
@BOTH
def test_every_regime_over_a_longer_run(channel_gate, regime):
    """Faults 33, 35: T = 65."""
    inputs = DeltaRuleCase(1, 65, 1, 2, 8, 5, channel_gate, regime).build(torch.float32)
    assert_recurrent_within_budget(channel_gate, inputs)


@FEW
@given(
    st.lists(st.integers(0, 3), max_size=3),
    delta_rule_cases(B=1, T=0, ratio=2),
    st.sampled_from([torch.int32, torch.int64]),
)
@example([0, 5, 0], DeltaRuleCase(1, 0, 1, 2, 2, 3, True), torch.int64)
def test_packed_sequences_get_their_own_states(lengths, case, dtype):
    """Faults 15, 34: also empty ones, whose state passes through."""
    case = dataclasses.replace(case, T=sum(lengths), states=len(lengths))
    inputs = case.build(torch.float32)
    cu_seqlens = bounds(lengths).to(dtype)
    assert_recurrent_within_budget(case.channel_gate, inputs, cu_seqlens=cu_seqlens)
    if case.with_state:
        final = triton_recurrent(case.channel_gate)(**inputs, cu_seqlens=cu_seqlens).final_state
        for n, length in enumerate(lengths):
            assert length or torch.equal(final[n], inputs["initial_state"][n])


@BOTH
@pytest.mark.parametrize("g", [math.log(1e-12), -1.0, -5.0, -60.0, -1e4, -torch.inf, 0.0])
def test_any_constant_decay_is_finite_and_right(channel_gate, g):
    """Faults 31, 32."""
    inputs = DeltaRuleCase(1, 12, 1, 1, 8, 5, channel_gate).build(torch.float32)
    inputs["g"] = torch.full_like(inputs["g"], g)
    assert_recurrent_within_budget(channel_gate, inputs)


DECODE_CASES = st.builds(
    PooledCase,
    lengths=st.integers(0, 2).map(lambda n: (1,) * n),
    replays=st.none(),
    H=st.integers(1, 2),
    ratio=st.sampled_from([1, 2]),
    **SIZES,
    channel_gate=st.booleans(),
    gated=st.sampled_from([None, "softplus", "safe"]),
    regime=st.sampled_from(REGIMES),
    without_slot=st.booleans(),
    seed=st.integers(0, 2**31 - 1),
)


@FEW
@given(
    DECODE_CASES,
    st.sampled_from([torch.float32, torch.float16]),
    st.sampled_from([torch.float32, torch.float16]),
    st.booleans(),
    st.booleans(),
)
def test_decode_is_within_twice_the_error_of_the_reference_and_touches_its_slots_only(
    case, dtype, pool_dtype, l2norm, other_order
):
    """Faults 11, 24, 25, 27, 30: gates and their kinds, pools in either order of V and K, slots left out."""
    x = decode_inputs(case, dtype, pool_dtype)
    if other_order:
        x["pool"] = in_other_order(x["pool"])
    assert_decode_within_budget(case.channel_gate, x, use_qk_l2norm=l2norm)


CASE = PooledCase((1,) * 3, None, 1, 2, 8, 5, True, "softplus", without_slot=True)


@BOTH
@pytest.mark.parametrize("gated", [None, "safe"])
def test_strides_of_inputs_and_pool_do_not_matter(channel_gate, gated):
    """Fault 26: the pool is one layer of a larger one, whose other parts stay as they are; q, k and v are slices."""
    x = decode_inputs(dataclasses.replace(CASE, channel_gate=channel_gate, gated=gated))
    whole = torch.full((6, 3, 2, 2, 5, 9), torch.nan)
    pool = whole[:, 1, 1, :, :, :8]
    pool.copy_(x["pool"])
    before = whole.clone()
    expected_pool = x["pool"].clone()
    expected = triton_decode(channel_gate)(**dict(x, pool=expected_pool))
    strided = {name: torch.stack([x[name], x[name] + 1], dim=-1)[..., 0] for name in PER_TOKEN}
    assert torch.equal(triton_decode(channel_gate)(**dict(x, pool=pool, **strided)), expected)
    assert torch.equal(bits(pool), bits(expected_pool))
    pool.copy_(x["pool"])
    assert torch.equal(bits(whole), bits(before))


@BOTH
def test_inputs_are_not_written_to(channel_gate):
    inputs = DeltaRuleCase(2, 3, 1, 2, 5, 3, channel_gate).build(torch.float32)
    before = {name: t.clone() for name, t in inputs.items()}
    got = triton_recurrent(channel_gate)(**inputs)
    assert all(torch.equal(t, before[name]) for name, t in inputs.items())
    assert got.final_state.data_ptr() != inputs["initial_state"].data_ptr()


@BOTH
def test_nan_stays_in_its_sequence(channel_gate):
    x = decode_inputs(dataclasses.replace(CASE, channel_gate=channel_gate))
    clean_pool = x["pool"].clone()
    clean = triton_decode(channel_gate)(**dict(x, pool=clean_pool))
    for sick, slot in enumerate(x["state_indices"].tolist()):
        pool, v = x["pool"].clone(), x["v"].clone()
        v[sick] = torch.nan
        if slot >= 0:
            pool[slot] = torch.nan
        got = triton_decode(channel_gate)(**dict(x, pool=pool, v=v))
        assert got[sick].isnan().all()
        others = [n for n in range(3) if n != sick]
        slots = [s for s in x["state_indices"].tolist() if s not in (slot, -1)]
        assert torch.equal(got[others], clean[others])
        assert torch.equal(pool[slots], clean_pool[slots])


def test_int32_and_strided_indices():
    x = decode_inputs(CASE)
    expected_pool = x["pool"].clone()
    expected = decode.decode_kda(**dict(x, pool=expected_pool))
    strided = torch.stack([x["state_indices"], x["state_indices"] + 1], dim=-1)[:, 0]
    for indices in (x["state_indices"].int(), strided):
        pool = x["pool"].clone()
        assert torch.equal(decode.decode_kda(**dict(x, pool=pool, state_indices=indices)), expected)
        assert torch.equal(bits(pool), bits(expected_pool))


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.float16])
@BOTH
def test_fp16_inputs_with_a_state_near_what_fp16_can_hold(channel_gate, pool_dtype):
    """Fault 35: what depends on the state is never FP16 inside."""
    x = decode_inputs(dataclasses.replace(CASE, channel_gate=channel_gate, gated=None), torch.float16, pool_dtype)
    x["pool"].sign_().mul_(65_000)
    x["g"] = torch.zeros_like(x["g"])
    x["beta"] = torch.full_like(x["beta"], 1e-3)  # S k is beyond FP16, what is written is not
    assert_decode_within_budget(channel_gate, x)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")  # of numpy, on branches not taken
@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize(("A_log", "dt_bias", "a"), [(100.0, -110.0, 5.0), (-100.0, 80.0, 0.0), (3.0, 200.0, 4.0)])
def test_gates_far_out_are_those_of_the_reference(A_log, dt_bias, a, bound):
    """Faults 29, 30: parameters in BF16 too."""
    x = decode_inputs(CASE)
    for dtype in (torch.float32, torch.bfloat16):
        gate = DecayGate(torch.full((2,), A_log, dtype=dtype), torch.full((2, 8), dt_bias, dtype=dtype), bound)
        mine, theirs = x["pool"].clone(), x["pool"].clone()
        arguments = dict(x, gate=gate, g=torch.full_like(x["g"], a))
        o = reference.decode_kda(**dict(arguments, pool=theirs))
        torch.testing.assert_close(decode.decode_kda(**dict(arguments, pool=mine)), o, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)


@BOTH
def test_many_sequences_are_one_flat_grid(channel_gate, monkeypatch):
    """Fault 35: an axis of a grid but the first ends at 65,535."""
    grids = []

    class Recorder:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **kwargs: None

    monkeypatch.setattr(decode, "delta_rule_kernel", Recorder())
    N = 70_000
    inputs = DeltaRuleCase(1, N, 1, 2, 2, 3, channel_gate, states=N).build(torch.float32)
    triton_recurrent(channel_gate)(**inputs, cu_seqlens=torch.arange(N + 1))
    assert grids == [(N * 2,)]


def test_the_launch_shrinks_its_tile_until_there_is_work_for_all_and_all_it_chooses_ships():
    chosen = [decode.decode_launch(states, 128, 128) for states in range(1, 3000)]
    assert [launch.block_v for launch in chosen] == sorted(launch.block_v for launch in chosen)
    assert {launch.block_v for launch in chosen} == {8, 16, 32}
    assert decode.decode_launch(32 * 32, 128, 128).block_v == 32
    ships = {(k.constexprs["BLOCK_V"], k.constexprs["LANES_K"], k.num_warps) for k in decode.shipped()}
    assert {(launch.block_v, launch.lanes_k, launch.num_warps) for launch in chosen} == ships


def test_wrong_arguments_are_refused():
    """The contract's own tests have every case; this one shows that it is asked."""
    x = decode_inputs(CASE)
    with pytest.raises(ValueError, match=r"^pool must be float32, bfloat16 or float16 for impl 'triton'"):
        decode.decode_kda(**dict(x, pool=x["pool"].double()))
    with pytest.raises(ValueError, match=r"^A_log must be float32"):
        decode.decode_kda(**dict(x, gate=x["gate"]._replace(A_log=x["gate"].A_log.double())))
    with pytest.raises(ValueError, match="state_indices"):
        decode.decode_kda(**dict(x, state_indices=x["state_indices"] + 50))
    with pytest.raises(ValueError, match=r"^g must"):
        decode.decode_gdn(**x)
    inputs = DeltaRuleCase(1, 3, 1, 1, 2, 3, False).build(torch.float32)
    with pytest.raises(ValueError, match=r"^initial_state must be float32"):
        decode.recurrent_gdn(**dict(inputs, initial_state=inputs["initial_state"].double()))
    with pytest.raises(ValueError, match="cu_seqlens"):
        decode.recurrent_gdn(**inputs, cu_seqlens=torch.tensor([0, 2, 1, 3]))
