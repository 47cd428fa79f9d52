"""Prefill by chunks, interpreted, against the reference in FP64.

The budget: per (sequence, head) at most twice the error that the token-by-token reference has in the kernel's
precision. Interpreted BF16 products are wrong (``test_canary.py``), so dtypes here are FP32 and FP16.
"""

import itertools
import math

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from dasc import reference
from dasc.contract import DeltaRuleOutput, RefreshMerge
from dasc.fast.triton import prefill, prefill_stages
from dasc.fast.triton.chunk_table import chunk_table
from tests.inputs import REGIMES, DeltaRuleCase
from tests.pooled_inputs import PooledCase, in_fp64, in_other_order, pooled_cases
from tests.reference.measures import FP32_EPS, assert_budget, assert_same, recurrent_of

BOTH = pytest.mark.parametrize("channel_gate", [False, True], ids=["gdn", "kda"])
PER_TOKEN = ("q", "k", "v", "g", "beta")
# a chunk of one head takes the interpreter a fifth of a second: few examples, and no search for smaller ones
FEW = settings(max_examples=4, phases=[Phase.explicit, Phase.generate])


def chunk_of(channel_gate):
    return prefill.chunk_kda if channel_gate else prefill.chunk_gdn


def prefill_of(channel_gate):
    return prefill.prefill_kda if channel_gate else prefill.prefill_gdn


def reference_prefill(channel_gate):
    return reference.prefill_kda if channel_gate else reference.prefill_gdn


def floor_of(T, K, chunk_size=64):
    """A head's own error may be small by luck, and a chunk of C tokens sums C updates where the recurrence, the delta
    rule having erased the others, holds K at a time."""
    return FP32_EPS * max(2.0, min(T, chunk_size, 64) / K)


def assert_chunk_within_budget(channel_gate, inputs, chunk_size=64, **options):
    exact = recurrent_of(channel_gate)(**in_fp64(inputs), **options)
    plain = recurrent_of(channel_gate)(**inputs, **options)
    got = chunk_of(channel_gate)(**inputs, chunk_size=chunk_size, **options)
    floor = floor_of(inputs["q"].shape[1], inputs["q"].shape[-1], chunk_size)
    assert_budget(got.o, plain.o, exact.o, (1, 3), floor)
    assert_budget(got.final_state, plain.final_state, exact.final_state, (2, 3), floor)


def assert_prefill_within_budget(channel_gate, x, chunk_size=64):
    """Outputs and slots; what no index names stays bit-identical."""
    pools = [in_fp64(x)["pool"], x["pool"].clone(), x["pool"].clone(memory_format=torch.preserve_format)]
    exact = reference_prefill(channel_gate)(**dict(in_fp64(x), pool=pools[0]), chunk_size=1)
    plain = reference_prefill(channel_gate)(**dict(x, pool=pools[1]), chunk_size=1)
    got = prefill_of(channel_gate)(**dict(x, pool=pools[2]), chunk_size=chunk_size)
    floor = floor_of(x["q"].shape[1], x["q"].shape[-1], chunk_size)
    edges = x["cu_seqlens"].tolist()
    for start, stop in itertools.pairwise(edges):
        assert_budget(got[:, start:stop], plain[:, start:stop], exact[:, start:stop], (1, 3), floor)
    slots = x["state_indices"][x["state_indices"] >= 0]
    assert_budget(pools[2][slots], pools[1][slots], pools[0][slots], (2, 3), floor)
    others = [s for s in range(len(x["pool"])) if s not in slots.tolist()]
    assert torch.equal(bits(pools[2][others]), bits(x["pool"][others]))


def bits(t):
    return t.reshape(-1).contiguous().view(torch.uint8)


def bounds(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)])


@FEW
@given(
    pooled_cases(max_sequences=2, H=1, ratio=2),
    st.sampled_from([torch.float32, torch.float16]),
    st.sampled_from([5, 64, 100]),
    st.booleans(),
)
@example(PooledCase((0, 5, 20), (0, 0, 20), 1, 2, 5, 7, True, "softplus"), torch.float32, 64, True)
@example(PooledCase((20, 3), (17, 1), 1, 1, 8, 3, False, "safe", without_slot=True), torch.float32, 5, False)
@example(PooledCase((20, 3), (17, 1), 1, 1, 8, 3, True, "safe", without_slot=True, seed=1), torch.float16, 64, True)
def test_prefill_is_within_twice_the_error_of_the_reference(case, dtype, chunk_size, k_first):
    """Faults 15, 19, 20, 24 to 27, 34: from the slot, through replay, merge and the rest, and back to the slot."""
    x = case.build(dtype, torch.float32)
    if k_first:
        x["pool"] = in_other_order(x["pool"])
    assert_prefill_within_budget(case.channel_gate, x, chunk_size)


@pytest.mark.parametrize("regime", REGIMES)
@BOTH
def test_every_regime(channel_gate, regime):
    """Fault 33. Four sub-blocks, the last one not full."""
    inputs = DeltaRuleCase(1, 60, 1, 2, 16, 12, channel_gate, regime).build(torch.float32)
    assert_chunk_within_budget(channel_gate, inputs)


@pytest.mark.parametrize("T", [0, 1, 63, 64, 65, 1000])
@BOTH
def test_lengths_around_the_size_of_a_chunk(channel_gate, T):
    """Fault 35, with decays so slow that every token matters to every other."""
    inputs = DeltaRuleCase(1, T, 1, 1, 16, 12, channel_gate, seed=T).build(torch.float32)
    inputs["g"] /= 20
    assert_chunk_within_budget(channel_gate, inputs)


@BOTH
@pytest.mark.parametrize(
    ("decays", "chunk_size"),
    [([math.log(1e-12)], 32), ([math.log(1e-12), -1.0, -2.5, -3.0, -5.0, -60.0, -torch.inf, 0.0], 64)],
)
def test_any_constant_decay_is_finite_and_right(channel_gate, decays, chunk_size):
    """Faults 31, 32, 33: each sequence of the batch has its own."""
    decays = torch.tensor(decays)
    inputs = DeltaRuleCase(len(decays), 64, 1, 1, 8, 5, channel_gate).build(torch.float32)
    inputs["g"] = decays.view(-1, *[1] * (inputs["g"].ndim - 1)).expand(inputs["g"].shape)
    assert_chunk_within_budget(channel_gate, inputs, chunk_size)


@pytest.mark.parametrize("fast_g", [-60.0, -torch.inf])
@BOTH
def test_small_decays_keep_their_digits_beside_vast_ones(channel_gate, fast_g):
    """Fault 33: where sums of -60 and -1e-3 are subtracted from each other, the small one is gone."""
    inputs = DeltaRuleCase(1, 64, 1, 2, 8, 5, channel_gate).build(torch.float32)
    choice = torch.randint(8, inputs["g"].shape, generator=torch.Generator().manual_seed(1))
    inputs["g"] = torch.tensor([fast_g, 0.0, *[-1e-3] * 3, *[-0.3] * 3])[choice]
    assert_chunk_within_budget(channel_gate, inputs)


@BOTH
def test_a_nan_decay_is_not_taken_for_a_vanishing_one(channel_gate):
    inputs = DeltaRuleCase(1, 20, 1, 1, 8, 5, channel_gate).build(torch.float32)
    inputs["g"][:, 10] = torch.nan
    assert chunk_of(channel_gate)(**inputs).final_state.isnan().all()


@pytest.mark.parametrize(("K", "V"), [(72, 140), (130, 20), (3, 256)])
@BOTH
def test_heads_of_several_blocks(channel_gate, K, V):
    """Fault 25: K and V are no powers of two, nor equal."""
    inputs = DeltaRuleCase(1, 20, 1, 1, K, V, channel_gate).build(torch.float16)
    assert_chunk_within_budget(channel_gate, inputs, use_qk_l2norm=True)


def test_states_of_a_ragged_batch_are_those_of_isolated_runs():
    """Fault 15: lengths 100, 140, 180 in chunks of 128, which are 64 here; the reference runs each by itself."""
    case = PooledCase((100, 140, 180), None, 1, 1, 16, 12, False, None, "slow")
    assert_prefill_within_budget(False, case.build(torch.float16, torch.float32), chunk_size=128)


@BOTH
@pytest.mark.parametrize("more", [1, 2, 3, 65])
def test_continuing_from_a_state_equals_the_sequential_run(channel_gate, more):
    """Fault 19: no shortcut for one token taken for two."""
    x = DeltaRuleCase(1, 9 + more, 1, 1, 8, 3, channel_gate).build(torch.float32)
    whole = recurrent_of(channel_gate)(**in_fp64(x))
    pool, slot = x.pop("initial_state"), torch.tensor([0], dtype=torch.int32)
    o = [
        prefill_of(channel_gate)(**{name: t[:, part] for name, t in x.items()}, pool=pool, state_indices=slot)
        for part in (slice(0, 9), slice(9, None))
    ]
    assert_same(DeltaRuleOutput(torch.cat(o, dim=1).double(), pool.double()), whole, 1e-6)


@BOTH
@pytest.mark.parametrize("without_slot", [False, True])
def test_a_replay_may_be_the_whole_sequence_or_end_at_a_chunk(channel_gate, without_slot):
    lengths, replays = (64, 10, 70), (64, 10, 64)
    case = PooledCase(lengths, replays, 1, 1, 8, 5, channel_gate, "softplus", without_slot=without_slot)
    assert_prefill_within_budget(channel_gate, case.build(torch.float16, torch.float32))


@BOTH
def test_an_empty_sequence_keeps_its_state(channel_gate):
    """Fault 34."""
    inputs = DeltaRuleCase(1, 5, 1, 1, 4, 3, channel_gate, states=3).build(torch.float32)
    final = chunk_of(channel_gate)(**inputs, cu_seqlens=torch.tensor([0, 0, 5, 5])).final_state
    for n, empty in enumerate((True, False, True)):
        assert torch.equal(final[n], inputs["initial_state"][n]) == empty


@BOTH
@pytest.mark.parametrize("B", [0, 2])
def test_no_tokens_and_no_sequences_give_no_output_and_the_initial_state(channel_gate, B):
    inputs = DeltaRuleCase(B, 0, 1, 2, 4, 3, channel_gate).build(torch.float32)
    got = chunk_of(channel_gate)(**inputs)
    assert got.o.shape == (B, 0, 2, 3)
    assert torch.equal(got.final_state, inputs["initial_state"])
    assert got.final_state.data_ptr() != inputs["initial_state"].data_ptr() or B == 0


@BOTH
def test_nan_stays_in_its_sequence(channel_gate):
    """Also where sequences are neighbours in memory and their chunks are not full."""
    lengths = [3, 17, 0]
    inputs = DeltaRuleCase(1, sum(lengths), 1, 1, 4, 3, channel_gate, states=3).build(torch.float16)
    edges = bounds(lengths)
    clean = chunk_of(channel_gate)(**inputs, cu_seqlens=edges)
    for sick, (start, stop) in enumerate(itertools.pairwise(edges.tolist())):
        poisoned = {name: t.clone() for name, t in inputs.items()}
        for name in PER_TOKEN:
            poisoned[name][:, start:stop] = torch.nan
        poisoned["initial_state"][sick] = torch.nan
        got = chunk_of(channel_gate)(**poisoned, cu_seqlens=edges)
        others = [n for n in range(3) if n != sick]
        assert torch.equal(got.final_state[others], clean.final_state[others])
        assert torch.equal(got.o[:, :start], clean.o[:, :start])
        assert torch.equal(got.o[:, stop:], clean.o[:, stop:])
        assert got.o[:, start:stop].isnan().all()
        assert got.final_state[sick].isnan().all()


@BOTH
def test_strides_do_not_matter_and_inputs_are_not_written(channel_gate):
    """Fault 26."""
    inputs, run = DeltaRuleCase(2, 6, 1, 2, 5, 3, channel_gate).build(torch.float16), chunk_of(channel_gate)
    permuted = {name: t.transpose(1, 2).contiguous().transpose(1, 2) for name, t in inputs.items()}
    spaced = {name: torch.stack([t, t + 1], dim=-1)[..., 0] for name, t in inputs.items()}
    originals = {name: t.clone() for name, t in inputs.items()}
    expected = run(**inputs)
    for other in (permuted, spaced):
        got = run(**other)
        assert torch.equal(got.o, expected.o)
        assert torch.equal(got.final_state, expected.final_state)
        assert all(torch.equal(other[name], originals[name]) for name in inputs)
    assert all(torch.equal(inputs[name], originals[name]) for name in inputs)


@BOTH
def test_scale_normalisation_and_heads_are_those_of_the_recurrence(channel_gate):
    """Fault 27: two key heads, each for two value heads."""
    inputs = DeltaRuleCase(1, 20, 2, 2, 8, 4, channel_gate, "zero_keys").build(torch.float32)
    inputs["k"] = inputs["k"] * 3
    for options in ({"scale": 3.0}, {"use_qk_l2norm": True, "scale": 0.5}):
        assert_chunk_within_budget(channel_gate, inputs, **options)


@BOTH
def test_half_precision_inputs_with_a_state_near_their_maximum_stay_finite(channel_gate):
    """Fault 35: the state leaves the range of FP16, whose numbers it was given."""
    inputs = DeltaRuleCase(1, 65, 1, 1, 4, 3, channel_gate, "zero_g").build(torch.float16)
    inputs["initial_state"] = torch.full_like(inputs["initial_state"], 65000.0)
    inputs["v"] = torch.full_like(inputs["v"], 60000.0)
    inputs["q"] = inputs["q"] * 1e-3
    assert inputs["initial_state"].abs().max() > 6e4
    assert_chunk_within_budget(channel_gate, inputs)


def test_the_pool_keeps_its_dtype():
    """Fault 24: computed in FP32, cast when written."""
    x = PooledCase((12,), (9,), 1, 1, 8, 5, True, "softplus").build(torch.float32, torch.float16)
    wide = dict(x, pool=x["pool"].float())
    prefill.prefill_kda(**x)
    prefill.prefill_kda(**wide)
    assert x["pool"].dtype == torch.float16
    assert torch.equal(x["pool"].nan_to_num(7), wide["pool"].half().nan_to_num(7))


@BOTH
def test_autocast_and_gradients_do_not_reach_inside(channel_gate):
    inputs = DeltaRuleCase(1, 5, 1, 1, 8, 4, channel_gate).build(torch.float32)
    plain = chunk_of(channel_gate)(**inputs)
    inputs["v"].requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        cast = chunk_of(channel_gate)(**inputs)
    for got, expected in zip(cast, plain, strict=True):
        assert torch.equal(got, expected)
        assert not got.requires_grad


@given(
    st.lists(st.tuples(st.integers(0, 200), st.floats(0, 1)), max_size=6), st.sampled_from([1, 7, 16, 63, 64, 65, 128])
)
def test_the_table_has_every_token_once_and_no_chunk_across_a_boundary(sequences, chunk_size):
    lengths = [length for length, _ in sequences]
    replays = torch.tensor([int(length * part) for length, part in sequences], dtype=torch.int64)
    edges = bounds(lengths)
    got = chunk_table(1, sum(lengths), edges, torch.device("cpu"), replay_tokens=replays, chunk_size=chunk_size)
    chunks = [(start, start + count) for start, count in got.chunks.tolist()]
    assert [t for start, stop in chunks for t in range(start, stop)] == list(range(sum(lengths)))
    assert all(0 < stop - start <= min(chunk_size, 64) for start, stop in chunks)
    inner = {*edges.tolist(), *(edges[:-1] + replays).tolist()}
    assert not any(start < edge < stop for start, stop in chunks for edge in inner)
    for n, (start, replay, tokens, first) in enumerate(got.sequences.tolist()):
        assert (start, replay, tokens) == (edges[n], replays[n], lengths[n])
        assert not tokens or chunks[first][0] == start
    assert got.has_replay == bool(replays.any())


class Recorded:
    """Stands for a kernel and notes its grids."""

    def __init__(self):
        self.grids = []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *args, **kwargs: None


@BOTH
def test_very_many_short_sequences_are_one_flat_grid(channel_gate, monkeypatch):
    """Fault 35: 70,000 sequences of one token, more than the second and third axis of a grid may have."""
    N = 70_000
    inputs = DeltaRuleCase(1, N, 1, 1, 2, 1, channel_gate, with_state=False).build(torch.float32)
    recorded = {name: Recorded() for name in vars(prefill_stages) if name.endswith("_kernel")}
    for name, kernel in recorded.items():
        monkeypatch.setattr(prefill_stages, name, kernel)
    chunk_of(channel_gate)(**inputs, cu_seqlens=torch.arange(N + 1))
    assert [grid for kernel in recorded.values() for grid in kernel.grids] == [(N,)] * 3


@BOTH
def test_short_sequences_each_have_their_own_chunk(channel_gate):
    N = 4
    inputs = DeltaRuleCase(1, N, 1, 1, 2, 1, channel_gate, states=N).build(torch.float32)
    got = chunk_of(channel_gate)(**inputs, cu_seqlens=torch.arange(N + 1))
    expected = recurrent_of(channel_gate)(**inputs, cu_seqlens=torch.arange(N + 1))
    torch.testing.assert_close(got, expected)


def test_one_table_serves_all_layers():
    x = PooledCase((20, 0), (8, 0), 1, 1, 4, 3, True, "softplus").build(torch.float32)
    pool = x["pool"].clone()
    expected = prefill.prefill_kda(**dict(x, pool=pool))
    table = chunk_table(1, 20, x.pop("cu_seqlens"), torch.device("cpu"), replay_tokens=x["refresh"].tokens)
    for _ in range(2):
        mine = dict(x, pool=x["pool"].clone())
        assert torch.equal(prefill.prefill_kda(**mine, table=table), expected)
        assert torch.equal(bits(mine["pool"]), bits(pool))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"table": chunk_table(2, 5, None, torch.device("cpu"))}, "table must be of 8 tokens and 2 seq"),
        ({"table": chunk_table(2, 4, None, torch.device("cpu"), replay_tokens=torch.tensor([1, 0]))},
         "refresh must be given"),
        ({"q": torch.zeros(2, 4, 2, 4).double()}, "q must be float32, bfloat16 or float16"),
        ({"pool": torch.zeros(4, 2, 3, 4).double()}, "pool must be float32, bfloat16 or float16"),
        ({"pool": torch.zeros(4, 2, 4, 3)}, r"pool must be \[S, HV, V, K\]"),
        ({"g": torch.zeros(2, 4, 2, 4)}, r"g must be \[B, T, HV\]"),
        ({"chunk_size": 0}, "chunk_size must be a positive integer"),
        ({"chunk_size": 2.0}, "chunk_size must be a positive integer"),
        ({"refresh": RefreshMerge(torch.ones(2, dtype=torch.bool), torch.tensor([0, 5]))}, "refresh.tokens must be"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(change, message):
    inputs = DeltaRuleCase(2, 4, 2, 1, 4, 3, False, with_state=False).build(torch.float32)
    good = {**inputs, "pool": torch.zeros(4, 2, 3, 4), "state_indices": torch.tensor([2, -1])}
    with pytest.raises(ValueError, match=message):
        prefill.prefill_gdn(**{**good, **change})


@BOTH
@pytest.mark.parametrize("edges", [[0, 12, 8, 16], [1, 16], [0, 17], []])
def test_wrong_boundaries_are_refused_and_left_alone(channel_gate, edges):
    """Fault 34."""
    inputs = DeltaRuleCase(1, 16, 1, 1, 2, 3, channel_gate, with_state=False).build(torch.float32)
    cu_seqlens = torch.tensor(edges, dtype=torch.int64)
    with pytest.raises(ValueError, match="cu_seqlens"):
        chunk_of(channel_gate)(**inputs, cu_seqlens=cu_seqlens)
    assert cu_seqlens.tolist() == edges


def test_fp16_values_never_become_fp16_operands():
    for dtypes in itertools.product([torch.float16, torch.bfloat16, torch.float32], repeat=3):
        for channel_gate in (False, True):
            launch = prefill_stages.prefill_launch(1, 128, 128, dtypes, channel_gate)
            assert launch.operand == (torch.bfloat16 if set(dtypes) == {torch.bfloat16} else torch.float32)
            assert launch.precision == ("ieee" if torch.float32 in dtypes else "tf32")
