"""A chunk's triangular system, and with it all that a chunk does apart from the state: KDA.

As :mod:`dasc.fast.triton.solve_kernels`, but with a decay for each key channel, so that decays enter the products of
keys and queries. Every decay is a product of ``alpha <= 1`` or the exponential of a sum of ``g <= 0``, never a quotient
or that of a difference: nothing overflows, and small ``g`` keep their digits beside vast ones.
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
    """Loaded ``g`` in base 2. It may be -inf, as sums of these are never subtracted."""
    return tl.load(g, mask=mask, other=0.0).to(tl.float32) * LOG2_E


@triton.jit
def _pick(x, AXIS: tl.constexpr, PLACE: tl.constexpr):
    """What is at ``PLACE`` of axis 0 or 1 of four, of length 2; the axis is kept."""
    place = tl.arange(0, 2)[:, None, None, None] if AXIS == 0 else tl.arange(0, 2)[None, :, None, None]
    return tl.sum(tl.where(place == PLACE, x, 0.0), axis=AXIS, keep_dims=True)


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

    Writes ``u`` ``[tokens, HV, V]`` and ``w`` ``[tokens, HV, K]``, which with ``L2NORM`` carry the norm of their
    token's key; ``queries`` ``[tokens, HV, K]``, scaled and decayed since the chunk's start; ``keys`` ``[tokens, HV,
    K]``, decayed until its end; ``pairs`` ``[tokens, HV, C]``, what each query gets of each write; and ``decay``
    ``[chunk, HV, K]`` of the whole chunk. With ``LOGIT``, ``beta`` is a gate input.

    The chunk has two halves of two quarters of 16 tokens. Of tokens ``j < i`` in different halves, or in different
    quarters of one half, the decay between them is that of ``j`` until the end of its part times that of ``i`` since
    the start of its own: one matrix product has all such pairs. Pairs inside a quarter are had channel by channel.
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
    sub = tl.arange(0, 4)
    j = tl.arange(0, 16)

    same_half = (i[:, None] // 32) == (i[None, :] // 32)
    half = tl.arange(0, 2)[:, None, None, None]
    quarter = tl.arange(0, 2)[None, :, None, None]
    overlap = tl.zeros((C, C), tl.float32)
    reads = tl.zeros((C, C), tl.float32)
    own_overlap = tl.zeros((4, 16, 16), tl.float32)  # quarter, token written, token reading
    own_reads = tl.zeros((4, 16, 16), tl.float32)
    k_squares = tl.zeros((C,), tl.float32)
    q_squares = tl.zeros((C,), tl.float32)
    for first in range(0, K, BLOCK_K):
        at = first + tl.arange(0, BLOCK_K)
        in_k = (at < K)[None, :]
        k_tile = tl.load(k + rows[:, None] * k_row + at[None, :], mask=live[:, None] & in_k, other=0.0).to(tl.float32)
        # inside quarters, a token of each at a time: what was written before it decays on
        written = tl.reshape(k_tile, (4, 16, BLOCK_K))
        total = tl.full((4, BLOCK_K), 1.0, tl.float32)
        for t in range(16):
            row = (start + sub * 16 + t)[:, None]
            in_row = (sub * 16 + t < count)[:, None] & in_k
            alpha = tl.exp2(_log2_decay(g + row * g_row + at[None, :], in_row))
            q_t = tl.load(q + row * q_row + at[None, :], mask=in_row, other=0.0).to(tl.float32)
            k_t = tl.load(k + row * k_row + at[None, :], mask=in_row, other=0.0).to(tl.float32)
            total *= alpha
            written *= tl.where(j[None, :, None] < t, alpha[:, None, :], 1.0)
            here = j[None, None, :] == t
            own_overlap += tl.where(here, tl.sum(written * k_t[:, None, :], axis=2)[:, :, None], 0.0)
            own_reads += tl.where(here, tl.sum(written * q_t[:, None, :], axis=2)[:, :, None], 0.0)

        # between quarters of one half; loaded only now, for want of registers
        q_tile = tl.load(q + rows[:, None] * q_row + at[None, :], mask=live[:, None] & in_k, other=0.0).to(tl.float32)
        log = _log2_decay(g + rows[:, None] * g_row + at[None, :], live[:, None] & in_k)
        if L2NORM:
            q_squares += tl.sum(q_tile * q_tile, axis=1)
            k_squares += tl.sum(k_tile * k_tile, axis=1)
        since = tl.reshape(tl.exp2(tl.cumsum(tl.reshape(log, (4, 16, BLOCK_K)), 1)), (2, 2, 16, BLOCK_K))
        written = tl.reshape(written, (2, 2, 16, BLOCK_K))
        total = tl.reshape(total, (2, 2, 1, BLOCK_K))
        later = tl.reshape(tl.where(quarter == 1, since, 0.0), (C, BLOCK_K))
        earlier = tl.trans(tl.reshape(tl.where(quarter == 0, written, 0.0), (C, BLOCK_K)).to(OPERAND))
        overlap += tl.where(same_half, matmul((k_tile * later).to(OPERAND), earlier, None, PRECISION), 0.0)
        reads += tl.where(same_half, matmul((q_tile * later).to(OPERAND), earlier, None, PRECISION), 0.0)

        # between halves
        since *= tl.where(quarter == 1, _pick(total, 1, 0), 1.0)
        written *= tl.where(quarter == 0, _pick(total, 1, 1), 1.0)
        later = tl.reshape(tl.where(half == 1, since, 0.0), (C, BLOCK_K))
        earlier = tl.trans(tl.reshape(tl.where(half == 0, written, 0.0), (C, BLOCK_K)).to(OPERAND))
        overlap = matmul((k_tile * later).to(OPERAND), earlier, overlap, PRECISION)
        reads = matmul((q_tile * later).to(OPERAND), earlier, reads, PRECISION)

        # to the chunk's end
        total = _pick(total, 1, 0) * _pick(total, 1, 1)
        written *= tl.where(half == 0, _pick(total, 0, 1), 1.0)
        written = tl.reshape(written, (C, BLOCK_K))
        place = (rows[:, None] * HV + head) * K + at[None, :]
        tl.store(keys + place, written.to(keys.dtype.element_ty), mask=live[:, None] & in_k)

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
    reads = tl.where(i[:, None] >= i[None, :], reads * q_norm[:, None], 0.0)
    at_pair = (rows[:, None] * HV + head) * C + i[None, :]
    tl.store(pairs + at_pair, reads.to(pairs.dtype.element_ty), mask=live[:, None])
    lower = tl.where(i[:, None] > i[None, :], overlap * (b * k_norm)[:, None] * k_norm[None, :], 0.0)
    inverse = inverse_of_unit_lower(lower, C, PRECISION) * k_norm[:, None] * b[None, :]
    times_rows(inverse.to(OPERAND), v + head * v_head, u + head * V, rows, live, v_row, HV * V, V, BLOCK_V, PRECISION)
    inverse = (inverse * k_norm[None, :]).to(OPERAND)
    for first in range(0, K, BLOCK_K):
        at = first + tl.arange(0, BLOCK_K)
        inside = live[:, None] & (at < K)[None, :]
        place = (rows[:, None] * HV + head) * K + at[None, :]
        q_tile = tl.load(q + rows[:, None] * q_row + at[None, :], mask=inside, other=0.0).to(tl.float32)
        k_tile = tl.load(k + rows[:, None] * k_row + at[None, :], mask=inside, other=0.0).to(tl.float32)
        log = _log2_decay(g + rows[:, None] * g_row + at[None, :], inside)
        since = tl.exp2(tl.cumsum(log, 0))
        x = q_tile * since * q_norm[:, None]
        tl.store(queries + place, x.to(queries.dtype.element_ty), mask=inside)
        x = matmul(inverse, (k_tile * since).to(OPERAND), None, PRECISION)
        tl.store(w + place, x.to(w.dtype.element_ty), mask=inside)
        tl.store(decay + (chunk * HV + head) * K + at, tl.exp2(tl.sum(log, axis=0)), mask=at < K)
