"""The recurrence of eq. 1 with a tile of the state in registers: one token for decode, or a loop over tokens."""

# mypy: ignore-errors
# (what @triton.jit makes of a function has no types)

import triton
import triton.language as tl

from dasc.fast.triton.gate_kernels import log_decay, sigmoid


@triton.jit
def _unit(x):
    square = tl.sum(tl.sum(x * x, axis=0), axis=0) + 1e-6
    root = tl.rsqrt(square)
    # the instruction is good to 2 ulp, one step of Newton's makes it 1
    return x * (root * (1.5 - 0.5 * square * root * root))


@triton.jit
def _over_k(x):
    """Sum a tile ``[BLOCK_K / LANES_K, BLOCK_V, LANES_K]`` over its two axes of ``K``: inside a thread first."""
    return tl.sum(tl.sum(x, axis=0), axis=1)


@triton.jit(do_not_specialize=["T"])
def delta_rule_kernel(
    q,
    k,
    v,
    g,
    beta,
    o,
    initial,
    final,
    state_indices,
    cu_seqlens,
    A_log,
    dt_bias,
    scale,
    lower_bound,
    T,
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
    initial_slot,
    initial_head,
    initial_v: tl.constexpr,
    initial_k: tl.constexpr,
    final_slot,
    final_head,
    final_v: tl.constexpr,
    final_k: tl.constexpr,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LANES_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHANNEL_GATE: tl.constexpr,
    SAFE_GATE: tl.constexpr,
    NEG_EIGVAL: tl.constexpr,
    L2NORM: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
):
    """A program: ``BLOCK_V`` rows of one value head's state, all of ``K``, over all tokens of one sequence.

    The tile is ``[BLOCK_K / LANES_K, BLOCK_V, LANES_K]``. As Triton spreads a warp over the last axes first, few
    threads share a row, and most of the two sums over ``K`` happens inside a thread, not by shuffles between them.

    Inputs are rows of tokens, ``[B * T, heads, ..]``, their last axis contiguous; ``o`` is contiguous. What is left out
    (``None``): ``initial`` is zero; without ``state_indices``, state ``n`` is sequence ``n``'s; without ``cu_seqlens``
    all sequences have ``T`` tokens; without ``A_log`` and ``dt_bias``, ``g`` and ``beta`` are no gate inputs.
    """
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    head = (pid // blocks) % HV
    key_head = (head // (HV // H)).to(tl.int64)
    n = (pid // (blocks * HV)).to(tl.int64)
    at_v = (pid % blocks) * BLOCK_V + tl.arange(0, BLOCK_V)
    at_k = tl.arange(0, BLOCK_K // LANES_K)[:, None] * LANES_K + tl.arange(0, LANES_K)[None, :]
    in_v = at_v < V
    in_k = at_k < K
    wide_head = head.to(tl.int64)
    wide_v = at_v.to(tl.int64)[None, :, None]
    wide_k = at_k.to(tl.int64)[:, None, :]

    slot = n
    if state_indices is not None:
        slot = tl.load(state_indices + n).to(tl.int64)
    in_slot = (at_v < tl.where(slot >= 0, V, 0))[None, :, None] & in_k[:, None, :]
    if initial is None:
        state = tl.zeros((BLOCK_K // LANES_K, BLOCK_V, LANES_K), tl.float32)
    else:
        source = initial + slot * initial_slot + wide_head * initial_head + wide_v * initial_v + wide_k * initial_k
        # read once: what many programs share should stay in the L2 cache instead
        state = tl.load(source, mask=in_slot, other=0.0, eviction_policy="evict_first").to(tl.float32)

    if ONE_TOKEN:
        first = n
        tokens = 1
    elif cu_seqlens is None:
        first = n * T
        tokens = T
    else:
        first = tl.load(cu_seqlens + n).to(tl.int64)
        tokens = (tl.load(cu_seqlens + n + 1) - first).to(tl.int32)
    if A_log is not None:
        log_rate = tl.load(A_log + head).to(tl.float32)
        if CHANNEL_GATE:
            bias = tl.load(dt_bias + head * K + at_k, mask=in_k, other=0.0).to(tl.float32)
        else:
            bias = tl.load(dt_bias + head).to(tl.float32)

    for t in range(tokens):
        row = first + t
        q_t = tl.load(q + row * q_row + key_head * q_head + at_k, mask=in_k, other=0.0).to(tl.float32)
        k_t = tl.load(k + row * k_row + key_head * k_head + at_k, mask=in_k, other=0.0).to(tl.float32)
        v_t = tl.load(v + row * v_row + wide_head * v_head + at_v, mask=in_v, other=0.0).to(tl.float32)
        beta_t = tl.load(beta + row * beta_row + wide_head * beta_head).to(tl.float32)
        if CHANNEL_GATE:
            g_t = tl.load(g + row * g_row + wide_head * g_head + at_k, mask=in_k, other=0.0).to(tl.float32)
        else:
            g_t = tl.load(g + row * g_row + wide_head * g_head).to(tl.float32)
        if L2NORM:
            q_t = _unit(q_t)
            k_t = _unit(k_t)
        if A_log is not None:
            g_t = log_decay(g_t + bias, log_rate, lower_bound, SAFE_GATE)
            beta_t = sigmoid(beta_t)
            if NEG_EIGVAL:
                beta_t *= 2.0
        alpha = tl.exp(g_t)
        if CHANNEL_GATE:
            alpha = alpha[:, None, :]
        state *= alpha
        delta = beta_t * (v_t - _over_k(state * k_t[:, None, :]))
        state += delta[None, :, None] * k_t[:, None, :]
        o_t = _over_k(state * (q_t * scale)[:, None, :])
        tl.store(o + (row * HV + head) * V + at_v, o_t.to(o.dtype.element_ty), mask=in_v)

    target = final + slot * final_slot + wide_head * final_head + wide_v * final_v + wide_k * final_k
    value = state.to(final.dtype.element_ty)
    tl.store(target, value, mask=in_slot, eviction_policy="evict_first")
