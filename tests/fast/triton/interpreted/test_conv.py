"""The convolution's kernels, interpreted, against the reference: outputs within rounding, kept rows bit for bit."""

import itertools

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from dasc import reference
from dasc.fast.triton import conv
from tests.reference.measures import FP32_EPS, relative_rms

# a program takes the interpreter some 10 ms: few examples, and no search for smaller ones
FEW = settings(max_examples=25, phases=[Phase.explicit, Phase.generate])
DTYPES = st.sampled_from([torch.float32, torch.float16])


def draw(seed, B, T, C, width, states=None, dtype=torch.float32):
    """x, weight, bias and initial_state."""
    gen = torch.Generator().manual_seed(seed)
    shapes = ((B, T, C), (C, width), (C,), (B if states is None else states, C, width - 1))
    return [torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype) for shape in shapes]


def bounds(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)])


def assert_equals_the_reference(x, weight, bias=None, *, initial_state=None, **options):
    """At most twice the error of the reference in the same precision, for each sequence of the batch and channel."""
    got = conv.causal_conv1d(x, weight, bias, initial_state=initial_state, **options)
    plain = reference.causal_conv1d(x, weight, bias, initial_state=initial_state, **options)
    x, weight, bias, initial_state = (None if t is None else t.double() for t in (x, weight, bias, initial_state))
    exact = reference.causal_conv1d(x, weight, bias, initial_state=initial_state, **options)
    for mine, theirs in zip(got, plain, strict=True):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        assert mine.is_contiguous()
    assert torch.equal(got.final_state, plain.final_state)
    assert got.y.isfinite().all()
    if got.y.numel():
        error, of_plain = relative_rms(got.y, exact.y, (1,)), relative_rms(plain.y, exact.y, (1,))
        excess = (error - 2 * of_plain - 4 * FP32_EPS).max()  # four products, whose sum may be small
        assert excess <= 0, f"{excess / FP32_EPS:.2f} eps over the budget"


@FEW
@given(
    seed=st.integers(0, 2**31 - 1),
    B=st.integers(0, 3),
    T=st.integers(0, 9),
    C=st.sampled_from([1, 3, 16, 130]),
    width=st.integers(1, 5),
    with_bias=st.booleans(),
    with_state=st.booleans(),
    silu=st.booleans(),
    dtype=DTYPES,
)
def test_equals_the_reference(seed, B, T, C, width, with_bias, with_state, silu, dtype):
    """Faults 24, 26: all dtypes, several blocks of channels and tokens, the last ones not full."""
    x, weight, bias, state = draw(seed, B, T, C, width, dtype=dtype)
    assert_equals_the_reference(
        x,
        weight,
        bias if with_bias else None,
        initial_state=state if with_state else None,
        activation="silu" if silu else None,
    )


@FEW
@given(
    seed=st.integers(0, 2**31 - 1),
    lengths=st.lists(st.integers(0, 6), max_size=6),
    width=st.integers(1, 5),
    with_state=st.booleans(),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
@example(seed=0, lengths=[0, 5, 0], width=4, with_state=True, dtype=torch.int64)
@example(seed=0, lengths=[1, 2, 3, 1, 2], width=4, with_state=True, dtype=torch.int64)
def test_packed_sequences_equal_the_reference(seed, lengths, width, with_state, dtype):
    """Faults 15, 34: each after its own state; an empty one passes it through, a short one keeps part of it."""
    x, weight, bias, state = draw(seed, 1, sum(lengths), 3, width, states=len(lengths))
    cu_seqlens = bounds(lengths).to(dtype)
    assert_equals_the_reference(x, weight, bias, initial_state=state if with_state else None, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("packed", [False, True])
def test_large_tiles_are_the_same(packed, monkeypatch):
    """Fault 35: tokens and sequences off every block size."""
    monkeypatch.setattr(conv, "conv_launch", lambda rows, C: conv.ConvLaunch(16, 8, 4))
    x, weight, bias, state = draw(1, 1, 65, 11, 4, states=4 if packed else 1)
    cu_seqlens = bounds([1, 30, 2, 32]) if packed else None
    assert_equals_the_reference(x, weight, bias, initial_state=state, cu_seqlens=cu_seqlens)


def test_nan_stays_in_its_sequence():
    lengths = [2, 5, 1, 0, 3]
    x, weight, bias, state = draw(0, 1, sum(lengths), 3, 4, states=5)
    edges = bounds(lengths)
    clean = conv.causal_conv1d(x, weight, bias, initial_state=state, cu_seqlens=edges)
    for sick, (start, stop) in enumerate(itertools.pairwise(edges.tolist())):
        poisoned_x, poisoned_state = x.clone(), state.clone()
        poisoned_x[:, start:stop], poisoned_state[sick] = torch.nan, torch.nan
        got = conv.causal_conv1d(poisoned_x, weight, bias, initial_state=poisoned_state, cu_seqlens=edges)
        others = [n for n in range(5) if n != sick]
        assert torch.equal(got.y[:, :start], clean.y[:, :start])
        assert torch.equal(got.y[:, stop:], clean.y[:, stop:])
        assert torch.equal(got.final_state[others], clean.final_state[others])
        assert got.final_state[sick].isnan().all()


def test_kept_rows_of_bf16_are_exact():
    x, weight, _, state = draw(0, 2, 2, 5, 4, dtype=torch.bfloat16)
    got = conv.causal_conv1d(x, weight, initial_state=state)
    expected = reference.causal_conv1d(x, weight, initial_state=state)
    assert torch.equal(got.final_state, expected.final_state)
    torch.testing.assert_close(got.y, expected.y, rtol=2**-7, atol=0)  # the interpreter truncates


def test_strides_do_not_matter_inputs_are_not_written_and_results_are_not_views():
    """Fault 26."""
    for T in (0, 2, 5):
        inputs = draw(0, 2, T, 3, 4)
        before = [t.clone() for t in inputs]
        doubled = [torch.stack([t, t + 1], dim=-1)[..., 0] for t in inputs]
        turned = [t.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1) for t in inputs]
        for x, weight, bias, state in (inputs, doubled, turned):
            assert_equals_the_reference(x, weight, bias, initial_state=state)
            for part in conv.causal_conv1d(x, weight, bias, initial_state=state):
                part.fill_(7)
        for variant in (inputs, doubled, turned):
            assert all(torch.equal(t, original) for t, original in zip(variant, before, strict=True))


def test_large_values_pass_the_activation():
    x, weight, bias, state = draw(0, 1, 6, 3, 4)
    assert_equals_the_reference(x * 1e3, weight, bias, initial_state=state)


def test_many_sequences_are_flat_grids(monkeypatch):
    """Fault 35: an axis of a grid but the first ends at 65,535."""
    grids = []

    class Recorder:
        def __getitem__(self, grid):
            grids.append(grid)
            return lambda *args, **kwargs: None

    for kernel in ("conv_kernel", "last_rows_kernel"):
        monkeypatch.setattr(conv, kernel, Recorder())
    N = 70_000
    x, weight, bias, state = draw(0, 1, N, 2, 4, states=N)
    conv.causal_conv1d(x, weight, bias, initial_state=state, cu_seqlens=torch.arange(N + 1))
    assert grids == [(N // 16,), (N,)]


def test_all_that_the_launch_chooses_ships():
    chosen = {conv.conv_launch(rows, 12_288) for rows in range(1, 2000)}
    ships = {
        (k.constexprs["BLOCK_T"], k.constexprs["BLOCK_C"], k.num_warps)
        for k in conv.shipped()
        if "BLOCK_T" in k.constexprs
    }
    assert {(launch.block_t, launch.block_c, launch.num_warps) for launch in chosen} == ships
    assert len(ships) == 2


def test_wrong_arguments_are_refused():
    """The contract's own tests have every case; this one shows that it is asked."""
    x, weight, bias, state = draw(0, 2, 5, 3, 4)
    with pytest.raises(ValueError, match="activation"):
        conv.causal_conv1d(x, weight, bias, activation="relu")
    with pytest.raises(ValueError, match=r"^weight must"):
        conv.causal_conv1d(x, weight[:2], bias)
    with pytest.raises(ValueError, match=r"^bias must be float32, bfloat16 or float16"):
        conv.causal_conv1d(x, weight, bias.double())
    with pytest.raises(ValueError, match=r"^initial_state must"):
        conv.causal_conv1d(x, weight, bias, initial_state=state[:1])
    with pytest.raises(ValueError, match="cu_seqlens"):
        conv.causal_conv1d(x[:1], weight, bias, cu_seqlens=torch.tensor([0, 4, 2, 5]))
