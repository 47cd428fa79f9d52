import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dasc.reference.conv import causal_conv1d


def draw(seed, B, T, C, width, states=None, dtype=torch.float64):
    """x, weight, bias and initial_state."""
    gen = torch.Generator().manual_seed(seed)
    shapes = ((B, T, C), (C, width), (C,), (B if states is None else states, C, width - 1))
    return [torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype) for shape in shapes]


ULP = {"rtol": 1e-14, "atol": 1e-300}  # torch's SiLU may differ in the last bit between lengths
SIZES = {"seed": st.integers(0, 2**31 - 1), "B": st.integers(1, 3), "T": st.integers(0, 9), "width": st.integers(1, 5)}


@given(**SIZES, with_bias=st.booleans(), silu=st.booleans())
def test_equals_torchs_convolution_over_state_and_tokens(seed, B, T, width, with_bias, silu):
    x, weight, bias, state = draw(seed, B, T, 3, width)
    bias = bias if with_bias else None
    rows = torch.cat([state, x.mT], dim=-1)
    expected = x if T == 0 else torch.nn.functional.conv1d(rows, weight.unsqueeze(1), bias, groups=3).mT
    got = causal_conv1d(x, weight, bias, initial_state=state, activation="silu" if silu else None)
    torch.testing.assert_close(got.y, torch.nn.functional.silu(expected) if silu else expected)
    # the last width - 1 inputs, oldest first; a sequence shorter than that keeps old rows
    assert torch.equal(got.final_state, rows[..., T:])


@given(**SIZES)
def test_no_state_is_a_state_of_zeros(seed, B, T, width):
    x, weight, bias, state = draw(seed, B, T, 3, width)
    got, expected = causal_conv1d(x, weight, bias), causal_conv1d(x, weight, bias, initial_state=state * 0)
    assert torch.equal(got.y, expected.y)
    assert torch.equal(got.final_state, expected.final_state)


@given(**SIZES, at=st.integers(0, 9))
def test_splitting_anywhere_and_passing_the_state_changes_nothing(seed, B, T, width, at):
    x, weight, bias, state = draw(seed, B, T, 3, width)
    whole = causal_conv1d(x, weight, bias, initial_state=state)
    first = causal_conv1d(x[:, :at], weight, bias, initial_state=state)
    second = causal_conv1d(x[:, at:], weight, bias, initial_state=first.final_state)
    torch.testing.assert_close(torch.cat([first.y, second.y], dim=1), whole.y, **ULP)
    assert torch.equal(second.final_state, whole.final_state)


@given(
    seed=SIZES["seed"],
    width=SIZES["width"],
    lengths=st.lists(st.integers(0, 6), max_size=6),
    with_state=st.booleans(),
)
def test_packed_sequences_equal_runs_by_themselves(seed, width, lengths, with_state):
    """Fault 34: empty sequences pass their rows through."""
    x, weight, bias, state = draw(seed, 1, sum(lengths), 3, width, states=len(lengths))
    bounds = torch.tensor([sum(lengths[:n]) for n in range(len(lengths) + 1)])
    packed = causal_conv1d(x, weight, bias, initial_state=state if with_state else None, cu_seqlens=bounds)
    assert packed.y.shape == x.shape
    assert packed.final_state.shape == state.shape
    for n, (start, stop) in enumerate(itertools.pairwise(bounds)):
        own = state[n : n + 1] if with_state else None
        alone = causal_conv1d(x[:, start:stop], weight, bias, initial_state=own)
        torch.testing.assert_close(packed.y[:, start:stop], alone.y, **ULP)
        assert torch.equal(packed.final_state[n : n + 1], alone.final_state)


def test_nan_stays_in_its_sequence():
    x, weight, bias, state = draw(0, 1, 6, 3, 4, states=2)
    clean = causal_conv1d(x, weight, bias, initial_state=state, cu_seqlens=torch.tensor([0, 3, 6]))
    x[:, :3], state[0] = torch.nan, torch.nan
    got = causal_conv1d(x, weight, bias, initial_state=state, cu_seqlens=torch.tensor([0, 3, 6]))
    assert torch.equal(got.y[:, 3:], clean.y[:, 3:])
    assert torch.equal(got.final_state[1], clean.final_state[1])


def test_later_tokens_do_not_change_earlier_outputs():
    x, weight, bias, state = draw(0, 2, 8, 3, 4)
    before = causal_conv1d(x, weight, bias, initial_state=state).y[:, :5]
    x[:, 5:] += 1
    assert torch.equal(causal_conv1d(x, weight, bias, initial_state=state).y[:, :5], before)


def test_a_width_of_one_carries_no_rows():
    x, weight, bias, state = draw(0, 2, 5, 3, 1)
    got = causal_conv1d(x, weight, bias, initial_state=state, activation=None)
    assert got.final_state.shape == (2, 3, 0)
    torch.testing.assert_close(got.y, x * weight[:, 0] + bias)


def test_strides_do_not_matter_and_inputs_are_not_written():
    """Fault 26."""
    inputs = draw(0, 2, 5, 3, 4)
    originals = [t.clone() for t in inputs]
    strided = [torch.stack([t, t + 1], dim=-1)[..., 0] for t in inputs]
    for x, weight, bias, state in (inputs, strided):
        got = causal_conv1d(x, weight, bias, initial_state=state)
        expected = causal_conv1d(*originals[:3], initial_state=originals[3])
        torch.testing.assert_close(got.y, expected.y, **ULP)
        assert torch.equal(got.final_state, expected.final_state)
    assert all(torch.equal(t, original) for t, original in zip(inputs, originals, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_output_has_the_dtype_of_x_and_rows_are_kept_without_loss(dtype):
    """Fault 24: rows are moved, not computed, whatever dtype they came in."""
    x, weight, bias, state = draw(0, 1, 2, 3, 4, dtype=dtype)
    got = causal_conv1d(x, weight, bias, initial_state=state)
    assert got.y.dtype == dtype
    assert got.final_state.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(got.final_state.to(dtype), torch.cat([state, x.mT], dim=-1)[..., 2:])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("x", lambda t: t[0]),
        ("x", lambda t: t.long()),
        ("weight", lambda t: t.unsqueeze(1)),
        ("weight", lambda t: t[:2]),
        ("weight", lambda t: t[:, :0]),
        ("bias", lambda t: t[:2]),
        ("initial_state", lambda t: t.mT),
        ("initial_state", lambda t: t[:1]),
    ],
)
def test_arguments_that_do_not_fit_are_refused_by_name(name, change):
    arguments = dict(zip(("x", "weight", "bias", "initial_state"), draw(0, 2, 5, 3, 3), strict=True))
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=f"^{name} must"):
        causal_conv1d(**arguments)


def test_wrong_activations_and_boundaries_are_refused():
    x, weight, bias, _ = draw(0, 2, 5, 3, 4)
    with pytest.raises(ValueError, match="activation"):
        causal_conv1d(x, weight, bias, activation="relu")
    with pytest.raises(ValueError, match="B = 1"):
        causal_conv1d(x, weight, bias, cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="cu_seqlens"):
        causal_conv1d(x[:1], weight, bias, cu_seqlens=torch.tensor([0, 4, 2, 5]))
