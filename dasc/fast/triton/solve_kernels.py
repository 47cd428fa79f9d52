"""A chunk's triangular system, and with it all that a chunk does apart from the state: GDN.

The state after token ``i`` of a chunk is ``S_0 Diag(D[i, start]) + sum_j x_j (k_j * D[i, j])^T`` over ``j <= i``.
``D[i, j]`` is the product of ``alpha`` over ``j + 1 .. i``, and the writes solve ``(I + L) x = beta (v - S_0 (k *
D[i, start]))`` with ``L[i, j] = beta_i k_i . (k_j * D[i, j])`` for ``j < i`` (WY form, UT transform). So
``x = u - w S_0^T`` with ``u = (I + L)^-1 beta v`` and ``w = (I + L)^-1 beta (k * D[i, start])``, both had here.
"""

# mypy: ignore-errors
# (what @triton.jit makes of a function has no types)

import triton
import triton.language as tl

from dasc.fast.triton.gate_kernels import log_decay, sigmoid
from dasc.fast.triton.product_kernels import matmul

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def on_diagonal(blocks, C: tl.constexpr):
    """``[C / 16, 16, 16]`` as the diagonal blocks of ``[C, C]``, zero elsewhere."""
    N: tl.constexpr = C // 16
    block = tl.arange(0, N)
    here = block[:, None, None, None] == block[None, None, :, None]
    wide = tl.broadcast_to(tl.reshape(blocks, (N, 16, 1, 16)), (N, 16, N, 16))
    return tl.reshape(tl.where(here, wide, 0.0), (C, C))


@triton.jit
def inverse_of_unit_lower(lower, C: tl.constexpr, PRECISION: tl.constexpr):
    """``(I + L)^-1`` for the strictly lower triangular ``L`` ``[C, C]`` in FP32, ``C`` 64 or less.

    Diagonal blocks of 16 by substitution, a column at a time. With their inverses ``D`` and the blocks ``N`` below them
    the whole is ``(I + D N)^-1 D``, and ``D N``, four blocks a side, has no fourth power. Powers of ``L`` itself would
    grow beyond FP32 and cancel where keys repeat.
    """
    N: tl.constexpr = C // 16
    block = tl.arange(0, N)
    at = tl.arange(0, 16)
    here = block[:, None, None, None] == block[None, None, :, None]
    system = tl.sum(tl.where(here, tl.reshape(lower, (N, 16, N, 16)), 0.0), axis=2)
    eye = at[None, :, None] == at[None, None, :]
    solved = tl.where(eye, 1.0, tl.zeros((N, 16, 16), tl.float32))
    for j in range(15):
        column = tl.sum(tl.where(at[None, None, :] == j, system, 0.0), axis=2)
        row = tl.sum(tl.where(at[None, :, None] == j, solved, 0.0), axis=1)
        solved -= column[:, :, None] * row[:, None, :]
    inverse = on_diagonal(solved, C)
    if N > 1:
        token = tl.arange(0, C)
        below = tl.where((token[:, None] // 16) > (token[None, :] // 16), lower, 0.0)
        step = matmul(inverse, below, None, PRECISION)
        unit = tl.where(token[:, None] == token[None, :], 1.0, 0.0)
        series = matmul(unit - step, unit + matmul(step, step, None, PRECISION), None, PRECISION)
        inverse = matmul(series, inverse, None, PRECISION)
    return inverse


@triton.jit
def times_rows(
    matrix,
    source,
    target,
    rows,
    live,
    source_row,
    target_row,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``matrix @ source`` for the rows of a chunk, ``BLOCK`` columns at a time, in the dtype of ``matrix``."""
    for first in range(0, DIM, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = live[:, None] & (at < DIM)[None, :]
        x = tl.load(source + rows[:, None] * source_row + at[None, :], mask=inside, other=0.0).to(matrix.dtype)
        y = matmul(matrix, x, None, PRECISION)
        tl.store(target + rows[:, None] * target_row + at[None, :], y.to(target.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def gdn_solve_kernel(
    k,
    v,
    g,
    beta,
    A_log,
    dt_bias,
    chunks,
    log_since,
    u,
    w,
    lower_bound,
    tokens,
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
    SAFE_GATE: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
    L2NORM: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program: one chunk of one value head.

    Writes ``log_since`` ``[HV, tokens]`` in FP64, log2 of the decay since the chunk's start, and ``u`` ``[tokens, HV,
    V]`` and ``w`` ``[tokens, HV, K]``. With ``L2NORM`` those two carry the norm of their token's key, so that later
    kernels read keys as they are. Without ``A_log`` (``None``), ``g`` and ``beta`` are no gate inputs.
    """
    pid = tl.program_id(0)
    chunk = (pid // HV).to(tl.int64)
    head = (pid % HV).to(tl.int64)
    start = tl.load(chunks + 2 * chunk)
    i = tl.arange(0, C)
    live = i < tl.load(chunks + 2 * chunk + 1)
    rows = start + i
    k += head // (HV // H) * k_head

    x = tl.load(g + rows * g_row + head * g_head, mask=live, other=0.0).to(tl.float32)
    b = tl.load(beta + rows * beta_row + head * beta_head, mask=live, other=0.0).to(tl.float32)
    if A_log is not None:
        bias = tl.load(dt_bias + head).to(tl.float32)
        x = log_decay(x + bias, tl.load(A_log + head).to(tl.float32), lower_bound, SAFE_GATE)
        x = tl.where(live, x, 0.0)
        b = tl.where(live, sigmoid(b), 0.0)
        if NEG_EIGVAL:
            b *= 2.0
    # FP64, and no term below -1000, whose exponential is zero: differences keep the digits of small terms beside it
    x = tl.where(x < -1000.0, -1000.0, x)
    log = tl.cumsum(x.to(tl.float64) * LOG2_E, 0)
    tl.store(log_since + head * tokens + rows, log, mask=live)

    gram = tl.zeros((C, C), tl.float32)
    squares = tl.zeros((C,), tl.float32)
    for first in range(0, K, BLOCK_K):
        at = first + tl.arange(0, BLOCK_K)
        keys = tl.load(k + rows[:, None] * k_row + at[None, :], mask=live[:, None] & (at < K)[None, :], other=0.0)
        if L2NORM:
            wide = keys.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
        keys = keys.to(OPERAND)
        gram = matmul(keys, tl.trans(keys), gram, PRECISION)
    norm = tl.full((C,), 1.0, tl.float32)
    if L2NORM:
        norm = 1.0 / tl.sqrt_rn(squares + 1e-6)

    before = i[:, None] > i[None, :]
    decay = tl.exp2(tl.where(before, log[:, None] - log[None, :], 0.0).to(tl.float32))
    lower = tl.where(before, gram * decay * (b * norm)[:, None] * norm[None, :], 0.0)
    inverse = inverse_of_unit_lower(lower, C, PRECISION) * norm[:, None] * b[None, :]
    times_rows(inverse.to(OPERAND), v + head * v_head, u + head * V, rows, live, v_row, HV * V, V, BLOCK_V, PRECISION)
    inverse *= (norm * tl.exp2(log.to(tl.float32)))[None, :]
    times_rows(inverse.to(OPERAND), k, w + head * K, rows, live, k_row, HV * K, K, BLOCK_K, PRECISION)
