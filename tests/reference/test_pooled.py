"""The pooled recurrences are the public ones, started from slots and put back there."""

import pytest
import torch
from hypothesis import example, given

from dasc import reference
from dasc.contract import RefreshMerge
from tests.inputs import DeltaRuleCase
from tests.pooled_inputs import PooledCase, in_other_order, pooled_cases

FORMS = {
    False: (reference.prefill_gdn, reference.decode_gdn, reference.recurrent_gdn),
    True: (reference.prefill_kda, reference.decode_kda, reference.recurrent_kda),
}


def gated(x: dict, n: slice) -> dict[str, torch.Tensor]:
    """The arguments of a public recurrence for some tokens, gates computed by the public functions."""
    own = {name: x[name][:, n] for name in ("q", "k", "v", "g", "beta")}
    if "gate" in x:
        gate = x["gate"]
        if gate.lower_bound is None:
            own["g"] = reference.softplus_gate(own["g"], gate.A_log, gate.dt_bias)
        else:
            own["g"] = reference.safe_gate(own["g"], gate.A_log, gate.dt_bias, gate.lower_bound)
        own["beta"] = reference.beta_gate(own["beta"], allow_neg_eigval=gate.allow_neg_eigval)
    return own


def expected(case: PooledCase, x: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Token by token, a sequence at a time, written the other way round: merge at the boundary by units."""
    recurrent = FORMS[case.channel_gate][2]
    pool, o = x["pool"].clone(), torch.zeros_like(x["v"])
    bounds = x["cu_seqlens"].tolist()
    for n, slot in enumerate(x["state_indices"].tolist()):
        begin, end = bounds[n], bounds[n + 1]
        stored = torch.zeros_like(pool[0]) if slot < 0 else pool[slot].clone()
        middle = begin + (x["refresh"].tokens[n].item() if "refresh" in x else 0)
        if middle > begin:
            replay = recurrent(**gated(x, slice(begin, middle)))
            o[:, begin:middle] = replay.o
            local = ~x["refresh"].keep
            if case.channel_gate:
                for h, k in local.nonzero().tolist():
                    stored[h, :, k] = replay.final_state[0, h, :, k]
            else:
                stored[local] = replay.final_state[0, local]
        rest = recurrent(**gated(x, slice(middle, end)), initial_state=stored[None])
        o[:, middle:end] = rest.o
        if slot >= 0:
            pool[slot] = rest.final_state[0]
    return o, pool


@given(pooled_cases())
@example(PooledCase((0, 5), (0, 0), 1, 2, 2, 3, True))
@example(PooledCase((4, 3), (4, 1), 1, 1, 2, 3, False, without_slot=True))
def test_prefill_is_the_recurrence_from_the_slot_and_back(case):
    """Faults 15, 19, 20, 25: each sequence at its own boundary; poisoned slots stay as they are."""
    x = case.build()
    o, pool = expected(case, x)
    got = FORMS[case.channel_gate][0](**x, chunk_size=8)
    torch.testing.assert_close(got, o, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(x["pool"], pool, rtol=1e-9, atol=1e-10, equal_nan=True)


@pytest.mark.parametrize("channel_gate", [False, True])
def test_decode_is_a_prefill_of_one_token(channel_gate):
    x = PooledCase((1,) * 4, None, 2, 2, 4, 3, channel_gate, "softplus", without_slot=True, seed=3).build()
    prefill, decode, _ = FORMS[channel_gate]
    pool = in_other_order(x["pool"])
    cu_seqlens = x.pop("cu_seqlens")
    o = prefill(**x, cu_seqlens=cu_seqlens)
    tokens = {name: x[name].transpose(0, 1) for name in ("q", "k", "v", "g", "beta")}
    got = decode(**tokens, pool=pool, state_indices=x["state_indices"], gate=x["gate"])
    torch.testing.assert_close(got.transpose(0, 1), o, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(pool, x["pool"], rtol=1e-10, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_pool_keeps_its_dtype(dtype):
    """Fault 24: computed in the compute dtype, cast when written."""
    case = PooledCase((5, 3), None, 1, 1, 4, 3, True)
    x = case.build(torch.float32, pool_dtype=dtype)
    exact = dict(x, pool=x["pool"].float())
    reference.prefill_kda(**x)
    reference.prefill_kda(**exact)
    assert x["pool"].dtype == dtype
    assert torch.equal(x["pool"].nan_to_num(7), exact["pool"].to(dtype).nan_to_num(7))


GOOD = DeltaRuleCase(2, 3, 1, 2, 4, 5, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pool": torch.zeros(4, 2, 4, 5)}, r"pool must be \[S, HV, V, K\] = \[4, 2, 5, 4\], got \[4, 2, 4, 5\]"),
        ({"pool": torch.zeros(4, 2, 5, 4, dtype=torch.int64)}, "pool must be floating-point"),
        ({"pool": torch.zeros(2, 5, 4)}, "pool must be floating-point"),
        ({"state_indices": torch.tensor([0])}, r"state_indices must be int32 or int64 \[2\]"),
        ({"state_indices": torch.tensor([0.0, 1.0])}, r"state_indices must be int32 or int64"),
        ({"state_indices": torch.tensor([0, 4])}, r"distinct and from -1 to 3, got \[0, 4\]"),
        ({"state_indices": torch.tensor([-2, 0])}, r"distinct and from -1 to 3"),
        ({"state_indices": torch.tensor([1, 1])}, r"distinct and from -1 to 3"),
        ({"refresh": RefreshMerge(torch.ones(2, 4, dtype=torch.bool), torch.tensor([0, 0]))}, r"refresh.keep must be"),
        ({"refresh": RefreshMerge(torch.ones(2), torch.tensor([0, 0]))}, r"refresh.keep must be torch.bool"),
        (
            {"refresh": RefreshMerge(torch.ones(2, dtype=torch.bool), torch.tensor([0, 4]))},
            "from 0 to the length of its sequence",
        ),
        ({"gate": reference.DecayGate(torch.zeros(2), torch.zeros(3))}, "dt_bias must have the axes"),
        ({"gate": reference.DecayGate(torch.zeros(2), torch.zeros(2), 1.0)}, "lower_bound must be negative"),
        ({"gate": reference.DecayGate(torch.zeros(2), torch.zeros(2, device="meta"))}, "dt_bias must be on cpu"),
        (
            {"refresh": RefreshMerge(torch.ones(2, dtype=torch.bool, device="meta"), torch.tensor([0, 0]))},
            "refresh.keep must be on cpu like q, got meta",
        ),
    ],
)
def test_wrong_arguments_are_named(change, message):
    inputs = GOOD.build(torch.float32)
    inputs.pop("initial_state")
    good = {**inputs, "pool": torch.zeros(4, 2, 5, 4), "state_indices": torch.tensor([2, -1])}
    reference.prefill_gdn(**good)
    with pytest.raises(ValueError, match=message):
        reference.prefill_gdn(**{**good, **change})


def test_a_bias_for_each_head_is_none_for_each_channel_though_there_be_as_many():
    """Fault 30. HV = K: it would broadcast over the wrong axis without a word."""
    x = PooledCase((3,), None, 2, 1, 2, 3, True, "softplus").build()
    x["gate"] = x["gate"]._replace(dt_bias=torch.zeros(2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"gate.dt_bias must be \[HV, K\] = \[2, 2\], got \[2\]"):
        reference.prefill_kda(**x)


def test_decode_takes_one_token_only():
    inputs = GOOD.build(torch.float32)
    inputs.pop("initial_state")
    with pytest.raises(ValueError, match="one token a sequence"):
        reference.decode_gdn(**inputs, pool=torch.zeros(4, 2, 5, 4), state_indices=torch.tensor([2, -1]))
