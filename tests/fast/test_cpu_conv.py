"""The convolution of the CPU path against the reference's."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dasc import fast, reference
from dasc.fast.cpu import conv


def draw(seed, B, T, C, width, states=None, dtype=torch.float64):
    """x, weight, bias and initial_state."""
    gen = torch.Generator().manual_seed(seed)
    shapes = ((B, T, C), (C, width), (C,), (B if states is None else states, C, width - 1))
    return [torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype) for shape in shapes]


def assert_equals_the_reference(x, weight, bias, **options):
    got, expected = fast.causal_conv1d(x, weight, bias, **options), reference.causal_conv1d(x, weight, bias, **options)
    torch.testing.assert_close(got.y, expected.y)
    assert torch.equal(got.final_state, expected.final_state)
    assert got.final_state.dtype == expected.final_state.dtype
    assert got.y.is_contiguous()
    assert got.final_state.is_contiguous()


SIZES = {"seed": st.integers(0, 2**31 - 1), "width": st.integers(1, 5), "piece": st.sampled_from([1, 6, 12, 10**4])}


@given(
    **SIZES,
    B=st.integers(0, 3),
    T=st.integers(0, 9),
    with_bias=st.booleans(),
    with_state=st.booleans(),
    silu=st.booleans(),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
def test_equals_the_reference(seed, width, piece, B, T, with_bias, with_state, silu, dtype):
    """Fault 24; with pieces of one row and more."""
    x, weight, bias, state = draw(seed, B, T, 3, width, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv, "PIECE_ELEMENTS", piece)
        assert_equals_the_reference(
            x,
            weight,
            bias if with_bias else None,
            initial_state=state if with_state else None,
            activation="silu" if silu else None,
        )


@given(**SIZES, lengths=st.lists(st.integers(0, 6), max_size=6), with_state=st.booleans())
def test_packed_sequences_equal_the_reference(seed, width, piece, lengths, with_state):
    """Faults 15, 34: every sequence begins after its own state, and an empty one passes its rows through."""
    x, weight, bias, state = draw(seed, 1, sum(lengths), 3, width, states=len(lengths))
    bounds = torch.tensor([0, *itertools.accumulate(lengths)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv, "PIECE_ELEMENTS", piece)
        assert_equals_the_reference(x, weight, bias, initial_state=state if with_state else None, cu_seqlens=bounds)


def test_nan_stays_in_its_sequence():
    lengths = [2, 5, 1, 0, 3]
    x, weight, bias, state = draw(0, 1, sum(lengths), 3, 4, states=5)
    edges = torch.tensor([0, *itertools.accumulate(lengths)])
    clean = fast.causal_conv1d(x, weight, bias, initial_state=state, cu_seqlens=edges)
    for sick, (start, stop) in enumerate(itertools.pairwise(edges.tolist())):
        poisoned_x, poisoned_state = x.clone(), state.clone()
        poisoned_x[:, start:stop], poisoned_state[sick] = torch.nan, torch.nan
        got = fast.causal_conv1d(poisoned_x, weight, bias, initial_state=poisoned_state, cu_seqlens=edges)
        others = [n for n in range(5) if n != sick]
        assert torch.equal(got.y[:, :start], clean.y[:, :start])
        assert torch.equal(got.y[:, stop:], clean.y[:, stop:])
        assert torch.equal(got.final_state[others], clean.final_state[others])


def test_very_many_short_sequences():
    """Fault 35: 70,000 sequences of one token."""
    N = 70_000
    x, weight, bias, state = draw(0, 1, N, 2, 4, states=N, dtype=torch.float32)
    assert_equals_the_reference(x, weight, bias, initial_state=state, cu_seqlens=torch.arange(N + 1))


def test_strides_do_not_matter_inputs_are_not_written_and_results_are_not_views():
    """Fault 26."""
    for T in (0, 2, 5):
        inputs = draw(0, 2, T, 3, 4)
        originals = [t.clone() for t in inputs]
        strided = [torch.stack([t, t + 1], dim=-1)[..., 0] for t in inputs]
        for x, weight, bias, state in (inputs, strided):
            assert_equals_the_reference(x, weight, bias, initial_state=state)
            got = fast.causal_conv1d(x, weight, bias, initial_state=state)
            got.y.fill_(7)
            got.final_state.fill_(7)
        assert all(torch.equal(t, original) for t, original in zip([*inputs, *strided], 2 * originals, strict=True))


def test_wrong_arguments_are_refused():
    """The contract's own tests have every case; this one shows that it is asked."""
    x, weight, bias, state = draw(0, 2, 5, 3, 4)
    with pytest.raises(ValueError, match="activation"):
        fast.causal_conv1d(x, weight, bias, activation="relu")
    with pytest.raises(ValueError, match=r"^weight must"):
        fast.causal_conv1d(x, weight[:2], bias)
    with pytest.raises(ValueError, match=r"^initial_state must"):
        fast.causal_conv1d(x, weight, bias, initial_state=state[:1])
    with pytest.raises(ValueError, match="cu_seqlens"):
        fast.causal_conv1d(x[:1], weight, bias, cu_seqlens=torch.tensor([0, 4, 2, 5]))
