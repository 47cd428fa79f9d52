"""The pooled recurrences on the CPU path against the reference's."""

import pytest
import torch
from hypothesis import given

from dasc import fast, reference
from tests.pooled_inputs import PooledCase, in_other_order, pooled_cases

PREFILL = {False: "prefill_gdn", True: "prefill_kda"}
DECODE = {False: "decode_gdn", True: "decode_kda"}


@given(pooled_cases())
def test_prefill_equals_the_reference(case):
    x = case.build()
    mine = dict(x, pool=in_other_order(x["pool"]))
    o = getattr(reference, PREFILL[case.channel_gate])(**x)
    got = getattr(fast, PREFILL[case.channel_gate])(**mine)
    torch.testing.assert_close(got, o, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(mine["pool"], x["pool"], rtol=1e-9, atol=1e-10, equal_nan=True)


@pytest.mark.parametrize("channel_gate", [False, True])
def test_a_batch_that_is_not_packed_is_the_same(channel_gate):
    case = PooledCase((6, 6), (2, 0), 1, 2, 4, 3, channel_gate, "softplus")
    x = case.build()
    x.pop("cu_seqlens")
    for name in ("q", "k", "v", "g", "beta"):
        x[name] = x[name].unflatten(1, (2, 6)).squeeze(0)
    mine = dict(x, pool=x["pool"].clone())
    o = getattr(reference, PREFILL[channel_gate])(**x)
    torch.testing.assert_close(getattr(fast, PREFILL[channel_gate])(**mine), o, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(mine["pool"], x["pool"], rtol=1e-10, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("channel_gate", [False, True])
@pytest.mark.parametrize("gated", [None, "softplus", "safe"])
def test_decode_equals_the_reference(channel_gate, gated):
    x = PooledCase((1,) * 5, None, 2, 2, 4, 3, channel_gate, gated, without_slot=True).build()
    x.pop("cu_seqlens")
    for name in ("q", "k", "v", "g", "beta"):
        x[name] = x[name].transpose(0, 1)
    mine = dict(x, pool=in_other_order(x["pool"]))
    o = getattr(reference, DECODE[channel_gate])(**x)
    torch.testing.assert_close(getattr(fast, DECODE[channel_gate])(**mine), o, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(mine["pool"], x["pool"], rtol=1e-10, atol=1e-12, equal_nan=True)
