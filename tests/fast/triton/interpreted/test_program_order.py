"""Programs of a launch need not run in the order of their numbers, as the interpreter has them.

Run backwards, each kernel must leave the same bits: a program that writes what another one owns, or reads what another
one of its launch writes, is seen here, where in ascending order the owner would put it right.
"""

from dataclasses import replace

import pytest
import torch
from triton.runtime.interpreter import interpreter_builder

from dasc.contract import DeltaRuleOutput
from dasc.fast.triton import checkpoint, conv, decode, prefill
from dasc.geometry import DtypePolicy
from tests.fast.triton.interpreted.test_checkpoint import LARGE
from tests.inputs import DeltaRuleCase
from tests.pooled_inputs import PooledCase
from tests.slot_pools import poisoned_pools, same_bits

BOTH = pytest.mark.parametrize("channel_gate", [False, True], ids=["gdn", "kda"])


@pytest.fixture
def backwards(monkeypatch):
    """Turns the order over from then on."""

    def turn_over():
        forwards = interpreter_builder.set_grid_idx
        monkeypatch.setattr(
            interpreter_builder,
            "set_grid_idx",
            lambda x, y, z: forwards(interpreter_builder.grid_dim[0] - 1 - x, y, z),
        )

    return turn_over


def assert_same_both_ways(run, backwards):
    first = run()
    backwards()
    for a, b in zip(first, run(), strict=True):
        assert same_bits(a, b)


@BOTH
def test_prefill(channel_gate, backwards):
    """Chunks that are not full, of sequences that are neighbours in memory; a replay in two of them."""
    x = PooledCase((20, 3, 70), (17, 0, 64), 1, 2, 8, 5, channel_gate, "softplus").build(torch.float32)

    def run():
        pool = x["pool"].clone()
        function = prefill.prefill_kda if channel_gate else prefill.prefill_gdn
        return function(**dict(x, pool=pool)), pool

    assert_same_both_ways(run, backwards)


@BOTH
def test_recurrent(channel_gate, backwards):
    x = DeltaRuleCase(1, 9, 1, 2, 8, 40, channel_gate, states=3).build(torch.float32)

    def run() -> DeltaRuleOutput:
        function = decode.recurrent_kda if channel_gate else decode.recurrent_gdn
        return function(**x, cu_seqlens=torch.tensor([0, 4, 5, 9]))

    assert_same_both_ways(run, backwards)


def test_convolution(backwards):
    gen = torch.Generator().manual_seed(0)
    x, weight, state = (torch.randn(*shape, generator=gen) for shape in ((1, 9, 150), (150, 4), (3, 150, 3)))
    bounds = torch.tensor([0, 2, 7, 9])
    assert_same_both_ways(lambda: conv.causal_conv1d(x, weight, initial_state=state, cu_seqlens=bounds), backwards)


@pytest.mark.parametrize("quantized", [None, "int8", "int4"])
@pytest.mark.parametrize("omitted", ["zero", "leave"])
def test_checkpoints(quantized, omitted, backwards):
    state, rows, layout = replace(LARGE, V=18).build()
    dtypes = DtypePolicy(layout.dtypes.temporal, quantized=quantized)
    layout = type(layout).from_mask(layout.geometry, layout.mask, dtypes)
    pools = poisoned_pools(state, rows.to(layout.dtypes.conv), layout, 0)

    def run():
        mine = pools.clone()
        checkpoint.pack_slots(mine.native, mine.native_slots, mine.store, mine.store_slots, layout)
        mine.native.temporal[:, mine.native_slots] = 7
        checkpoint.unpack_slots(mine.store, mine.store_slots, mine.native, mine.native_slots, layout, omitted=omitted)
        return [part for part in (*mine.native, *mine.store) if part is not None]

    assert_same_both_ways(run, backwards)
