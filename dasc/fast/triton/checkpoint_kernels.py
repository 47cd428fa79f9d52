"""Kernels that copy checkpoints between the native pool and the compressed one, all layers in one launch.

The grid is flat: ``jobs`` programs a checkpoint. The first ``unit_jobs`` of them copy a tile of units each, the rest a
block of convolution rows. A tile is ``[BLOCK_V, BLOCK_K]`` of one head. Where its KDA channels become rows, the
compiler turns it over in shared memory, so that both sides are coalesced. Which head a tile is of and where its units
are stored comes from tables (:mod:`dasc.fast.triton.checkpoint_tables`). ``BITS`` is 0 for exact copies, else 8 or 4.

In INT4 a tile is one of stored bytes, and ``V`` is half of the values: byte ``v`` holds the codes of values ``v`` and
``v + V``, which are two loads or stores of the same tile.
"""

# mypy: ignore-errors
# (what @triton.jit makes of a function has no types)

import triton
import triton.language as tl

from dasc import contract

MIN_ABSMAX = tl.constexpr(contract.MIN_ABSMAX)
QMAX_8 = tl.constexpr(float(contract.QMAX["int8"]))
QMAX_4 = tl.constexpr(float(contract.QMAX["int4"]))
MAX_FINITE = tl.constexpr(3.4028234663852886e38)
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2 ** 23: adding and subtracting it rounds |x| < 2 ** 22 half to even


@triton.jit
def _tile(tiles, rows, job, KDA: tl.constexpr, K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr):
    """Layer, head, value and key indices of a tile, the row where each column is stored, and which have one."""
    layer = tl.load(tiles + 4 * job).to(tl.int64)
    head = tl.load(tiles + 4 * job + 1).to(tl.int64)
    v = (tl.load(tiles + 4 * job + 2) * BLOCK_V + tl.arange(0, BLOCK_V)).to(tl.int64)
    column = tl.arange(0, BLOCK_K)
    k = (tl.load(tiles + 4 * job + 3) * BLOCK_K + column).to(tl.int64)
    if KDA:
        row = tl.load(rows + job * BLOCK_K + column)
        return layer, head, v, k, row, row >= 0
    else:
        row = tl.load(rows + job) + tl.zeros_like(column)
        return layer, head, v, k, row, (row >= 0) & (k < K)


@triton.jit
def _in_buffer(row, slot_units, n, checkpoints, group_starts, group_sizes, v, k, KDA: tl.constexpr, K: tl.constexpr):
    """Which columns lie in the buffer between ranks, and there the row and the place of each value and scale."""
    is_sent = row >= slot_units
    j = row - slot_units
    start = tl.load(group_starts + j, mask=is_sent, other=0).to(tl.int64)
    size = tl.load(group_sizes + j, mask=is_sent, other=0).to(tl.int64)
    row = checkpoints * start + n * size + (j - start)
    if KDA:
        return is_sent, row, v[:, None], tl.zeros_like(k)
    else:
        return is_sent, row, v[:, None] * K + k[None, :], k


@triton.jit
def _absmax(x):
    """Largest magnitude over axis 0, infinity for a column with NaN or infinity."""
    x = tl.abs(x)
    return tl.max(tl.where(x <= MAX_FINITE, x, float("inf")), axis=0)


@triton.jit
def _codes(x, absmax, scale, QMAX: tl.constexpr):
    """``q`` of eq. 8 in int8; 0 in a column with NaN or infinity."""
    q = tl.div_rn(x, tl.broadcast_to(scale[None, :], x.shape))
    q = (q + ROUNDER) - ROUNDER
    q = tl.minimum(tl.maximum(q, -QMAX), QMAX)
    return tl.where((absmax <= MAX_FINITE)[None, :], q, 0.0).to(tl.int8)


@triton.jit
def _quantize(x):
    """Eq. 8 over axis 0: ``q`` and the FP32 scale; 0 and NaN for a column with NaN or infinity."""
    absmax = _absmax(x)
    scale = tl.div_rn(tl.maximum(absmax, MIN_ABSMAX), QMAX_8)
    return _codes(x, absmax, scale, QMAX_8), tl.where(absmax <= MAX_FINITE, scale, float("nan"))


@triton.jit
def _quantize_halves(x, y):
    """As ``_quantize`` in INT4, for the two halves of the values: codes of ``x`` in the low halves of bytes."""
    absmax = tl.maximum(_absmax(x), _absmax(y))
    scale = tl.div_rn(tl.maximum(absmax, MIN_ABSMAX), QMAX_4)
    low, high = _codes(x, absmax, scale, QMAX_4), _codes(y, absmax, scale, QMAX_4)
    return (low & 15) | (high << 4), tl.where(absmax <= MAX_FINITE, scale, float("nan"))


@triton.jit
def _dequantize(q, scale):
    """``q * scale`` over axis 0, rounded once to the dtype of the scale."""
    if scale.dtype == tl.float64:
        return q.to(tl.float64) * scale[None, :]
    else:
        return (q.to(tl.float32) * scale.to(tl.float32)[None, :]).to(scale.dtype)


@triton.jit
def _copy_conv(
    source,
    target,
    job,
    source_layer,
    source_c,
    source_r,
    target_layer,
    target_c,
    target_r,
    CONV_C: tl.constexpr,
    CONV_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Copy one block of the rows of one layer."""
    BLOCKS: tl.constexpr = (CONV_C + BLOCK_C - 1) // BLOCK_C
    layer = (job // BLOCKS).to(tl.int64)
    c = (job % BLOCKS * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)[:, None]
    r = tl.arange(0, BLOCK_R).to(tl.int64)[None, :]
    inside = (c < CONV_C) & (r < CONV_R)
    rows = tl.load(source + layer * source_layer + c * source_c + r * source_r, mask=inside)
    tl.store(target + layer * target_layer + c * target_c + r * target_r, rows, mask=inside)


@triton.jit(do_not_specialize=["jobs", "unit_jobs", "checkpoints", "slot_units"])
def pack_kernel(
    native,
    native_conv,
    store,
    store_conv,
    scales,
    buffer,
    buffer_scales,
    native_slots,
    store_slots,
    tiles,
    rows,
    sectors,
    group_starts,
    group_sizes,
    jobs,
    unit_jobs,
    checkpoints,
    slot_units,
    native_layer,
    native_slot,
    native_head,
    native_v,
    native_k,
    store_layer,
    store_slot,
    store_row,
    store_v,
    store_k,
    scales_layer,
    scales_slot,
    scales_row,
    scales_k,
    native_conv_layer,
    native_conv_slot,
    native_conv_c,
    native_conv_r,
    store_conv_layer,
    store_conv_slot,
    store_conv_c,
    store_conv_r,
    buffer_row,
    buffer_scales_row,
    KDA: tl.constexpr,
    BITS: tl.constexpr,
    PARTITION: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,
    CONV_C: tl.constexpr,
    CONV_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SECTOR_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Native slots to compressed slots; with ``PARTITION``, units whose row is no row of a slot to ``buffer``.

    A tile whose sectors are all empty is padding and becomes zero.
    """
    program = tl.program_id(0)
    n = program // jobs
    job = program % jobs
    source = tl.load(native_slots + n).to(tl.int64)
    target = tl.load(store_slots + n).to(tl.int64)
    if job < unit_jobs:
        layer, head, v, k, row, is_kept = _tile(tiles, rows, job, KDA, K, BLOCK_V, BLOCK_K)
        in_v = (v < V)[:, None]
        if KDA:
            # a sector of channels that are all omitted is not read; a mask of one value a sector leaves loads wide
            sector = tl.arange(0, BLOCK_K) // SECTOR_K
            is_read = (tl.load(sectors + job * (BLOCK_K // SECTOR_K) + sector) != 0) & (k < K)
        else:
            is_read = (tl.load(sectors + job) + tl.zeros_like(k) != 0) & (k < K)
        native += layer * native_layer + source * native_slot + head * native_head
        columns = native + k[None, :] * native_k
        x = tl.load(columns + v[:, None] * native_v, mask=in_v & is_read[None, :], other=0)
        if BITS == 8:
            x, scale = _quantize(x.to(tl.float32))
        if BITS == 4:
            y = tl.load(columns + (v + V)[:, None] * native_v, mask=in_v & is_read[None, :], other=0)
            x, scale = _quantize_halves(x.to(tl.float32), y.to(tl.float32))
        if BITS:
            scale = tl.where(is_read, scale, 0.0)
            scales += layer * scales_layer + target * scales_slot
        if PARTITION:
            is_sent, to_row, place, scale_place = _in_buffer(
                row, slot_units, n, checkpoints, group_starts, group_sizes, v, k, KDA, K
            )
            tl.store(buffer + to_row[None, :] * buffer_row + place, x, mask=in_v & (is_kept & is_sent)[None, :])
            if BITS:
                tl.store(buffer_scales + to_row * buffer_scales_row + scale_place, scale, mask=is_kept & is_sent)
            is_kept = is_kept & (row < slot_units)
        row = row.to(tl.int64)
        store += layer * store_layer + target * store_slot
        tl.store(
            store + row[None, :] * store_row + v[:, None] * store_v + k[None, :] * store_k,
            x,
            mask=in_v & is_kept[None, :],
        )
        if BITS:
            tl.store(scales + row * scales_row + k * scales_k, scale, mask=is_kept)
    else:
        _copy_conv(
            native_conv + source * native_conv_slot,
            store_conv + target * store_conv_slot,
            job - unit_jobs,
            native_conv_layer,
            native_conv_c,
            native_conv_r,
            store_conv_layer,
            store_conv_c,
            store_conv_r,
            CONV_C,
            CONV_R,
            BLOCK_C,
            BLOCK_R,
        )


@triton.jit(do_not_specialize=["jobs", "unit_jobs", "checkpoints", "slot_units"])
def unpack_kernel(
    native,
    native_conv,
    store,
    store_conv,
    scales,
    buffer,
    buffer_scales,
    native_slots,
    store_slots,
    tiles,
    rows,
    group_starts,
    group_sizes,
    jobs,
    unit_jobs,
    checkpoints,
    slot_units,
    native_layer,
    native_slot,
    native_head,
    native_v,
    native_k,
    store_layer,
    store_slot,
    store_row,
    store_v,
    store_k,
    scales_layer,
    scales_slot,
    scales_row,
    scales_k,
    native_conv_layer,
    native_conv_slot,
    native_conv_c,
    native_conv_r,
    store_conv_layer,
    store_conv_slot,
    store_conv_c,
    store_conv_r,
    buffer_row,
    buffer_scales_row,
    KDA: tl.constexpr,
    BITS: tl.constexpr,
    PARTITION: tl.constexpr,
    LEAVE: tl.constexpr,
    V: tl.constexpr,
    K: tl.constexpr,
    CONV_C: tl.constexpr,
    CONV_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """The inverse of ``pack_kernel``: omitted units of a tile become zero, or with ``LEAVE`` are not written.

    Not even with their own values: what replays them may be writing to them.
    """
    program = tl.program_id(0)
    n = program // jobs
    job = program % jobs
    source = tl.load(store_slots + n).to(tl.int64)
    target = tl.load(native_slots + n).to(tl.int64)
    if job < unit_jobs:
        layer, head, v, k, row, is_kept = _tile(tiles, rows, job, KDA, K, BLOCK_V, BLOCK_K)
        in_v = (v < V)[:, None]
        is_own = is_kept
        if PARTITION:
            is_own = is_kept & (row < slot_units)
        own_row = row.to(tl.int64)
        store += layer * store_layer + source * store_slot
        x = tl.load(
            store + own_row[None, :] * store_row + v[:, None] * store_v + k[None, :] * store_k,
            mask=in_v & is_own[None, :],
            other=0,
        )
        if BITS:
            scales += layer * scales_layer + source * scales_slot
            scale = tl.load(scales + own_row * scales_row + k * scales_k, mask=is_own, other=0)
        if PARTITION:
            is_sent, from_row, place, scale_place = _in_buffer(
                row, slot_units, n, checkpoints, group_starts, group_sizes, v, k, KDA, K
            )
            is_sent = is_sent & is_kept
            came = tl.load(buffer + from_row[None, :] * buffer_row + place, mask=in_v & is_sent[None, :], other=0)
            x = tl.where(is_sent[None, :], came, x)
            if BITS:
                came_scale = tl.load(buffer_scales + from_row * buffer_scales_row + scale_place, mask=is_sent, other=0)
                scale = tl.where(is_sent, came_scale, scale)
        is_written = k < K
        if LEAVE:
            is_written = is_kept
        native += layer * native_layer + target * native_slot + head * native_head
        columns = native + k[None, :] * native_k
        if BITS == 4:
            high = _dequantize(x >> 4, scale)
            tl.store(columns + (v + V)[:, None] * native_v, high, mask=in_v & is_written[None, :])
            x = (x << 4) >> 4
        if BITS:
            x = _dequantize(x, scale)
        tl.store(columns + v[:, None] * native_v, x, mask=in_v & is_written[None, :])
    else:
        _copy_conv(
            store_conv + source * store_conv_slot,
            native_conv + target * native_conv_slot,
            job - unit_jobs,
            store_conv_layer,
            store_conv_c,
            store_conv_r,
            native_conv_layer,
            native_conv_c,
            native_conv_r,
            CONV_C,
            CONV_R,
            BLOCK_C,
            BLOCK_R,
        )
