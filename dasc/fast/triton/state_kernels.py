"""The state across the chunks of a sequence, the only serial part of prefill."""

# mypy: ignore-errors
# (what @triton.jit makes of a function has no types)

import triton
import triton.language as tl

from dasc.fast.triton.product_kernels import matmul


@triton.jit(do_not_specialize=["tokens"])
def state_kernel(
    k,
    w,
    u,
    decay,
    states,
    pool,
    state_indices,
    keep,
    sequences,
    tokens,
    k_row,
    k_head,
    pool_slot,
    pool_head,
    pool_v,
    pool_k,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHANNEL_GATE: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A program: ``BLOCK_V`` rows of one value head's state, as ``[K, V]`` in FP32, through one sequence.

    From the slot of ``pool`` it goes through the chunks of the replay, from zero, takes the units to ``keep`` from the
    slot, goes through the rest and back to the slot. Before each chunk the state is left in ``states`` ``[chunk, HV, K,
    V]``, and ``u`` becomes the chunk's writes, ``u - w S^T``.

    ``decay`` is ``log_since`` of GDN, or of KDA that of a whole chunk, ``[chunk, HV, K]``; KDA's ``k`` are decayed
    until the end of the chunk. Without ``keep`` (``None``) there is no replay.
    """
    blocks: tl.constexpr = (V + BLOCK_V - 1) // BLOCK_V
    pid = tl.program_id(0)
    head = (pid // blocks % HV).to(tl.int64)
    n = (pid // (blocks * HV)).to(tl.int64)
    begin = tl.load(sequences + 4 * n)
    replay = tl.load(sequences + 4 * n + 1)
    end = begin + tl.load(sequences + 4 * n + 2)
    chunk = tl.load(sequences + 4 * n + 3)
    if begin == end:  # the slot stays as it is
        return
    slot = tl.load(state_indices + n).to(tl.int64)

    at_k = tl.arange(0, BLOCK_K)
    at_v = pid % blocks * BLOCK_V + tl.arange(0, BLOCK_V)
    in_k = at_k < K
    in_v = at_v < V
    in_state = in_k[:, None] & in_v[None, :]
    in_slot = in_state & (at_v < tl.where(slot >= 0, V, 0))[None, :]
    i = tl.arange(0, C)
    k += head // (HV // H) * k_head + at_k[None, :]
    w += head * K + at_k[None, :]
    u += head * V + at_v[None, :]
    states += head * (K * V) + at_k[:, None] * V + at_v[None, :]
    own = pool + slot * pool_slot + head * pool_head
    own += at_k.to(tl.int64)[:, None] * pool_k + at_v.to(tl.int64)[None, :] * pool_v

    state = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    for part in range(1 if keep is None else 0, 2):
        is_replay = part == 0
        first = begin + tl.where(is_replay, 0, replay)
        stop = tl.where(is_replay, begin + replay, end)
        kept = replay == 0
        if keep is not None:
            if CHANNEL_GATE:
                kept = kept | (tl.load(keep + head * K + at_k, mask=in_k, other=0) != 0)
            else:
                kept = kept | (tl.load(keep + head) != 0)
        from_slot = (at_k < tl.where(kept, tl.where(is_replay, 0, K), 0))[:, None] & in_v[None, :]
        stored = tl.load(own, mask=from_slot & in_slot, other=0.0)
        state = tl.where(from_slot, stored.to(tl.float32), state)
        for row in range(first, stop, CHUNK):
            rows = (row + i)[:, None]
            live = i < tl.minimum(stop - row, CHUNK)
            at_key = live[:, None] & in_k[None, :]
            at_value = live[:, None] & in_v[None, :]
            tl.store(states + chunk * (HV * K * V), state.to(states.dtype.element_ty), mask=in_state)
            reads = tl.load(w + rows * (HV * K), mask=at_key, other=0.0)
            keys = tl.load(k + rows * k_row, mask=at_key, other=0.0)
            x = tl.load(u + rows * (HV * V), mask=at_value, other=0.0).to(tl.float32)
            x -= matmul(reads, state.to(OPERAND), None, PRECISION)
            tl.store(u + rows * (HV * V), x.to(u.dtype.element_ty), mask=at_value)
            if CHANNEL_GATE:
                state *= tl.load(decay + (chunk * HV + head) * K + at_k, mask=in_k, other=0.0)[:, None]
            else:
                since = decay + head * tokens
                last = tl.load(since + tl.minimum(row + CHUNK, stop) - 1)
                until = last - tl.load(since + row + i, mask=live, other=0.0)
                x *= tl.exp2(tl.where(live, until, 0.0).to(tl.float32))[:, None]
                state *= tl.exp2(last.to(tl.float32))
            state = matmul(tl.trans(keys).to(OPERAND), x.to(OPERAND), state, PRECISION)
            chunk += 1
    tl.store(own, state.to(pool.dtype.element_ty), mask=in_slot)
