"""The outputs of prefill: what each token reads from the state before its chunk and from the writes in it."""

# mypy: ignore-errors
# (what @triton.jit makes of a function has no types)

import triton
import triton.language as tl

from dasc.fast.triton.product_kernels import matmul


@triton.jit(do_not_specialize=["tokens"])
def gdn_output_kernel(
    q,
    k,
    u,
    log_since,
    states,
    o,
    chunks,
    scale,
    tokens,
    q_row,
    q_head,
    k_row,
    k_head,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    L2NORM: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program: one chunk of one value head, ``BLOCK_V`` columns of ``o`` ``[tokens, HV, V]``."""
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    head = (pid // blocks % HV).to(tl.int64)
    chunk = (pid // (blocks * HV)).to(tl.int64)
    start = tl.load(chunks + 2 * chunk)
    i = tl.arange(0, C)
    live = i < tl.load(chunks + 2 * chunk + 1)
    rows = start + i
    at_v = pid % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    in_v = at_v < V
    q += head // (HV // H) * q_head
    k += head // (HV // H) * k_head
    states += (chunk * HV + head) * (K * V) + at_v[None, :]

    pairs = tl.zeros((C, C), tl.float32)
    out = tl.zeros((C, BLOCK_V), tl.float32)
    squares = tl.zeros((C,), tl.float32)
    for first in range(0, K, BLOCK_K):
        at_k = first + tl.arange(0, BLOCK_K)
        in_k = at_k < K
        in_keys = live[:, None] & in_k[None, :]
        queries = tl.load(q + rows[:, None] * q_row + at_k[None, :], mask=in_keys, other=0.0)
        keys = tl.load(k + rows[:, None] * k_row + at_k[None, :], mask=in_keys, other=0.0)
        state = tl.load(states + at_k[:, None] * V, mask=in_k[:, None] & in_v[None, :], other=0.0)
        if L2NORM:
            wide = queries.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
        queries = queries.to(OPERAND)
        pairs = matmul(queries, tl.trans(keys.to(OPERAND)), pairs, PRECISION)
        out = matmul(queries, state, out, PRECISION)
    factor = tl.full((C,), scale, tl.float32)
    if L2NORM:
        factor = factor / tl.sqrt_rn(squares + 1e-6)

    log = tl.load(log_since + head * tokens + rows, mask=live, other=0.0)
    reached = (i[:, None] >= i[None, :]) & live[:, None]
    decay = tl.exp2(tl.where(reached, log[:, None] - log[None, :], 0.0).to(tl.float32))
    pairs = tl.where(reached, pairs * decay, 0.0)
    at_value = live[:, None] & in_v[None, :]
    writes = tl.load(u + (rows[:, None] * HV + head) * V + at_v[None, :], mask=at_value, other=0.0)
    out = out * tl.exp2(log.to(tl.float32))[:, None]
    out = matmul(pairs.to(OPERAND), writes, out, PRECISION) * factor[:, None]
    tl.store(o + (rows[:, None] * HV + head) * V + at_v[None, :], out.to(o.dtype.element_ty), mask=at_value)


@triton.jit
def kda_output_kernel(
    q,
    pairs,
    u,
    states,
    o,
    chunks,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """As ``gdn_output_kernel``; ``q`` ``[tokens, HV, K]`` and ``pairs`` ``[tokens, HV, C]`` are decayed and scaled."""
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    head = (pid // blocks % HV).to(tl.int64)
    chunk = (pid // (blocks * HV)).to(tl.int64)
    i = tl.arange(0, C)
    live = i < tl.load(chunks + 2 * chunk + 1)
    rows = ((tl.load(chunks + 2 * chunk) + i) * HV + head)[:, None]
    at_v = pid % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    in_v = at_v < V
    states += (chunk * HV + head) * (K * V) + at_v[None, :]

    at_value = live[:, None] & in_v[None, :]
    weights = tl.load(pairs + rows * C + i[None, :], mask=live[:, None], other=0.0)
    writes = tl.load(u + rows * V + at_v[None, :], mask=at_value, other=0.0)
    out = matmul(weights, writes, None, PRECISION)
    for first in range(0, K, BLOCK_K):
        at_k = first + tl.arange(0, BLOCK_K)
        in_k = at_k < K
        queries = tl.load(q + rows * K + at_k[None, :], mask=live[:, None] & in_k[None, :], other=0.0)
        state = tl.load(states + at_k[:, None] * V, mask=in_k[:, None] & in_v[None, :], other=0.0)
        out = matmul(queries, state, out, PRECISION)
    tl.store(o + rows * V + at_v[None, :], out.to(o.dtype.element_ty), mask=at_value)
