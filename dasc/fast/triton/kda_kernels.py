"""A chunk's triangular system, and with it all that a chunk does apart from the state: KDA.

As :mod:`dasc.fast.triton.solve_kernels`, but with a decay for each key channel, so that decays enter the products of
keys and queries. Every exponent is a sum of ``g <= 0``, none a difference of sums: nothing overflows, and small ``g``
keep their digits beside vast ones.
"""

# mypy: ignore-errors
# (what @triton.jit makes of a function has no types)

import triton
import triton.language as tl

from dasc.fast.triton.gate_kernels import sigmoid
from dasc.fast.triton.product_kernels import matmul
from dasc.fast.triton.solve_kernels import LOG2_E, inverse_of_unit_lower, on_diagonal, times_rows


@triton.jit
def _log2_decay(g, mask):
    """Loaded ``g`` in base 2. Below -200 the exponential is zero, and sums stay well within FP32."""
    x = tl.load(g, mask=mask, other=0.0).to(tl.float32)
    return tl.where(x < -200.0, -200.0, x) * LOG2_E


@triton.jit
def _decay_since(log, SIZE: tl.constexpr):
    """``[C, BLOCK]``: the decay from the start of each sub-block of ``SIZE`` tokens, the token's own included."""
    C: tl.constexpr = log.shape[0]
    BLOCK: tl.constexpr = log.shape[1]
    summed = tl.cumsum(tl.reshape(log, (C // SIZE, SIZE, BLOCK)), 1)
    return tl.exp2(tl.reshape(summed, (C, BLOCK)))


@triton.jit
def _decay_until(next_log, SIZE: tl.constexpr):
    """``[C, BLOCK]``: the decay from after the token to the end of its sub-block, from the logs of the next tokens."""
    C: tl.constexpr = next_log.shape[0]
    BLOCK: tl.constexpr = next_log.shape[1]
    token = tl.arange(0, C)[:, None]
    log = tl.where(token % SIZE == SIZE - 1, 0.0, next_log)
    summed = tl.cumsum(tl.reshape(log, (C // SIZE, SIZE, BLOCK)), 1, reverse=True)
    return tl.exp2(tl.reshape(summed, (C, BLOCK)))


@triton.jit
def kda_solve_kernel(
    q,
    k,
    v,
    g,
    beta,
    chunks,
    u,
    w,
    queries,
    keys,
    pairs,
    decay,
    scale,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    g_row,
    g_head,
    beta_row,
    beta_head,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    LOGIT: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
    L2NORM: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program: one chunk of one value head.

    Writes ``u`` ``[tokens, HV, V]`` and ``w`` ``[tokens, HV, K]``; ``queries`` ``[tokens, HV, K]``, scaled and decayed
    since the chunk's start; ``keys`` ``[tokens, HV, K]``, decayed until its end; ``pairs`` ``[tokens, HV, C]``, what
    each query gets of each write; and ``decay`` ``[chunk, HV, K]`` of the whole chunk.

    Of two tokens ``j < i`` in different sub-blocks of 16, take the halves of the chunk, or of a half, that they fall
    into: the decay between them is that of ``j`` until the end of its part times that of ``i`` since the start of its
    own, so one matrix product has all such pairs. Pairs inside a sub-block are had channel by channel.
    """
    pid = tl.program_id(0)
    chunk = (pid // HV).to(tl.int64)
    head = (pid % HV).to(tl.int64)
    start = tl.load(chunks + 2 * chunk)
    count = tl.load(chunks + 2 * chunk + 1)
    i = tl.arange(0, C)
    live = i < count
    rows = start + i
    q += head // (HV // H) * q_head
    k += head // (HV // H) * k_head
    g += head * g_head
    N: tl.constexpr = C // 16
    sub = tl.arange(0, N)
    j = tl.arange(0, 16)

    half = i // (C // 2)
    across_halves = half[:, None] > half[None, :]
    quarter = i // (C // 4)
    across_quarters = (half[:, None] == half[None, :]) & (quarter[:, None] > quarter[None, :])
    overlap = tl.zeros((C, C), tl.float32)
    reads = tl.zeros((C, C), tl.float32)
    own_overlap = tl.zeros((N, 16, 16), tl.float32)  # sub-block, token written, token reading
    own_reads = tl.zeros((N, 16, 16), tl.float32)
    k_squares = tl.zeros((C,), tl.float32)
    q_squares = tl.zeros((C,), tl.float32)
    for first in range(0, K, BLOCK_K):
        at = first + tl.arange(0, BLOCK_K)
        inside = live[:, None] & (at < K)[None, :]
        q_tile = tl.load(q + rows[:, None] * q_row + at[None, :], mask=inside, other=0.0).to(tl.float32)
        k_tile = tl.load(k + rows[:, None] * k_row + at[None, :], mask=inside, other=0.0).to(tl.float32)
        if L2NORM:
            q_squares += tl.sum(q_tile * q_tile, axis=1)
            k_squares += tl.sum(k_tile * k_tile, axis=1)
        log = _log2_decay(g + rows[:, None] * g_row + at[None, :], inside)
        has_next = (i + 1 < count)[:, None] & (at < K)[None, :]
        next_log = _log2_decay(g + (rows + 1)[:, None] * g_row + at[None, :], has_next)
        for level in tl.static_range(2):
            since = _decay_since(log, C // 2 if level == 0 else C // 4)
            written = tl.trans((k_tile * _decay_until(next_log, C // 2 if level == 0 else C // 4)).to(OPERAND))
            across = across_halves if level == 0 else across_quarters
            met = matmul((k_tile * since).to(OPERAND), written, None, PRECISION)
            overlap += tl.where(across, met, 0.0)
            met = matmul((q_tile * since).to(OPERAND), written, None, PRECISION)
            reads += tl.where(across, met, 0.0)
        written = tl.reshape(k_tile, (N, 16, BLOCK_K))
        for t in range(16):
            row = (start + sub * 16 + t)[:, None]
            in_row = (sub * 16 + t < count)[:, None] & (at < K)[None, :]
            alpha = tl.exp2(_log2_decay(g + row * g_row + at[None, :], in_row))
            q_row_t = tl.load(q + row * q_row + at[None, :], mask=in_row, other=0.0).to(tl.float32)
            k_row_t = tl.load(k + row * k_row + at[None, :], mask=in_row, other=0.0).to(tl.float32)
            written = tl.where(j[None, :, None] < t, written * alpha[:, None, :], written)
            here = j[None, None, :] == t
            own_overlap += tl.where(here, tl.sum(written * k_row_t[:, None, :], axis=2)[:, :, None], 0.0)
            own_reads += tl.where(here, tl.sum(written * q_row_t[:, None, :], axis=2)[:, :, None], 0.0)

    b = tl.load(beta + rows * beta_row + head * beta_head, mask=live, other=0.0).to(tl.float32)
    if LOGIT:
        b = tl.where(live, sigmoid(b), 0.0)
        if NEG_EIGVAL:
            b *= 2.0
    k_norm = tl.full((C,), 1.0, tl.float32)
    q_norm = tl.full((C,), scale, tl.float32)
    if L2NORM:
        k_norm = 1.0 / tl.sqrt_rn(k_squares + 1e-6)
        q_norm = q_norm / tl.sqrt_rn(q_squares + 1e-6)

    same = (i[:, None] // 16) == (i[None, :] // 16)
    overlap = tl.where(same, on_diagonal(tl.permute(own_overlap, (0, 2, 1)), C), overlap)
    reads = tl.where(same, on_diagonal(tl.permute(own_reads, (0, 2, 1)), C), reads)
    reads = tl.where(i[:, None] >= i[None, :], reads * q_norm[:, None] * k_norm[None, :], 0.0)
    tl.store(pairs + (rows[:, None] * HV + head) * C + i[None, :], reads.to(pairs.dtype.element_ty), mask=live[:, None])
    lower = tl.where(i[:, None] > i[None, :], overlap * (b * k_norm)[:, None] * k_norm[None, :], 0.0)
    inverse = inverse_of_unit_lower(lower, C, PRECISION) * b[None, :]
    times_rows(inverse.to(OPERAND), v + head * v_head, u + head * V, rows, live, v_row, HV * V, V, BLOCK_V, PRECISION)
    inverse = (inverse * k_norm[None, :]).to(OPERAND)
    for first in range(0, K, BLOCK_K):
        at = first + tl.arange(0, BLOCK_K)
        inside = live[:, None] & (at < K)[None, :]
        place = (rows[:, None] * HV + head) * K + at[None, :]
        q_tile = tl.load(q + rows[:, None] * q_row + at[None, :], mask=inside, other=0.0).to(tl.float32)
        k_tile = tl.load(k + rows[:, None] * k_row + at[None, :], mask=inside, other=0.0).to(tl.float32)
        log = _log2_decay(g + rows[:, None] * g_row + at[None, :], inside)
        has_next = (i + 1 < count)[:, None] & (at < K)[None, :]
        next_log = _log2_decay(g + (rows + 1)[:, None] * g_row + at[None, :], has_next)
        since = _decay_since(log, C)
        x = q_tile * since * q_norm[:, None]
        tl.store(queries + place, x.to(queries.dtype.element_ty), mask=inside)
        x = k_tile * _decay_until(next_log, C) * k_norm[:, None]
        tl.store(keys + place, x.to(keys.dtype.element_ty), mask=inside)
        x = matmul(inverse, (k_tile * since).to(OPERAND), None, PRECISION)
        tl.store(w + place, x.to(w.dtype.element_ty), mask=inside)
        tl.store(decay + (chunk * HV + head) * K + at, tl.exp2(tl.sum(log, axis=0)), mask=at < K)
