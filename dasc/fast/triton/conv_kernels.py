"""The short causal convolution: tiles of tokens and channels, and the rows that a checkpoint carries of it."""

# mypy: ignore-errors
# (what @triton.jit makes of a function has no types)

import triton
import triton.language as tl

from dasc.fast.triton.gate_kernels import sigmoid


@triton.jit(do_not_specialize=["rows", "T"])
def conv_kernel(
    x,
    weight,
    bias,
    state,
    sequence,
    starts,
    y,
    rows,
    T,
    x_row,
    weight_channel,
    weight_tap,
    state_n,
    state_channel,
    state_tap,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """A program: ``BLOCK_T`` tokens, of whatever sequences, by ``BLOCK_C`` channels.

    ``x`` has rows of tokens, contiguous channels; ``y`` is contiguous. What is left out (``None``): ``bias`` and
    ``state`` are zero; without ``sequence``, the sequence of each row, all sequences have ``T`` tokens.
    """
    blocks: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    pid = tl.program_id(0)
    row = (pid // blocks).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    channel = (pid % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    in_row = row < rows
    in_channel = channel < C
    wide_channel = channel.to(tl.int64)
    if sequence is None:
        n = row // T
        begin = n * T
    else:
        n = tl.load(sequence + row, mask=in_row, other=0)
        begin = tl.load(starts + n, mask=in_row, other=0)

    acc = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    if bias is not None:
        acc += tl.load(bias + channel, mask=in_channel, other=0.0).to(tl.float32)[None, :]
    taps = weight + wide_channel * weight_channel
    for i in tl.static_range(WIDTH):
        source = row - (WIDTH - 1) + i
        inside = (in_row & (source >= begin))[:, None] & in_channel[None, :]
        value = tl.load(x + source[:, None] * x_row + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        tap = tl.load(taps + i * weight_tap, mask=in_channel, other=0.0).to(tl.float32)
        acc += value * tap[None, :]
    if state is not None:  # noqa: SIM102 - this one is settled when the kernel is compiled
        # only a sequence's first tokens reach back to the state: few tiles have any
        if tl.min(row - begin, axis=0) < WIDTH - 1:
            for i in tl.static_range(WIDTH - 1):
                since = row - begin + i  # the state's row, unless it is a token already
                inside = (in_row & (since < WIDTH - 1))[:, None] & in_channel[None, :]
                old = state + n[:, None] * state_n + wide_channel[None, :] * state_channel + since[:, None] * state_tap
                value = tl.load(old, mask=inside, other=0.0).to(tl.float32)
                tap = tl.load(taps + i * weight_tap, mask=in_channel, other=0.0).to(tl.float32)
                acc += value * tap[None, :]
    if SILU:
        acc *= sigmoid(acc)
    target = y + row[:, None] * C + channel[None, :]
    tl.store(target, acc.to(y.dtype.element_ty), mask=in_row[:, None] & in_channel[None, :])


@triton.jit
def last_rows_kernel(
    x,
    state,
    starts,
    lengths,
    final,
    x_row,
    state_n,
    state_channel,
    state_tap,
    C: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """A program: the last ``WIDTH - 1`` inputs of one sequence, ``BLOCK_C`` channels of ``final``, which is contiguous.

    Where a sequence is shorter they are rows of ``state``, or zero without one (``None``).
    """
    blocks: tl.constexpr = (C + BLOCK_C - 1) // BLOCK_C
    pid = tl.program_id(0)
    n = (pid // blocks).to(tl.int64)
    channel = ((pid % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)[:, None]
    tap = tl.arange(0, BLOCK_W)[None, :]
    inside = (channel < C) & (tap < WIDTH - 1)
    since = tl.load(lengths + n) - (WIDTH - 1) + tap  # the token, or if negative a row of the state
    is_token = since >= 0
    token = (tl.load(starts + n) + since) * x_row + channel
    value = tl.load(x + token, mask=inside & is_token, other=0.0).to(tl.float32)
    if state is not None:
        old = state + n * state_n + channel * state_channel + (since + WIDTH - 1) * state_tap
        value = tl.where(is_token, value, tl.load(old, mask=inside & ~is_token, other=0.0).to(tl.float32))
    tl.store(final + (n * C + channel) * (WIDTH - 1) + tap, value, mask=inside)
