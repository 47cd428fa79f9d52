"""The gates of eq. 2: as functions for other kernels, and one elementwise kernel."""

# mypy: ignore-errors
# (what @triton.jit makes of a function has no types)

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """Of FP32. Neither side of zero overflows, so no quotient of infinities."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def log_decay(x, A_log, lower_bound, SAFE: tl.constexpr):
    """``g``, the natural log, from ``x = a + dt_bias`` in FP32."""
    # the root of the rate, multiplied with twice: only the product meets zero or infinity
    root = tl.exp(0.5 * A_log)
    root = tl.clamp(root, 1.1754944e-38, 3.4028234e38, propagate_nan=tl.PropagateNan.ALL)
    if SAFE:
        return lower_bound * sigmoid(x * root * root)
    else:
        e = tl.exp(-tl.abs(x))
        u = 1.0 + e
        # ln(1 + e); the quotient makes good for what u lost of e
        log1p = tl.where(u == 1.0, e, tl.log(u) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))
        g = -(tl.maximum(x, 0.0) + log1p) * root * root
        # far below, softplus(x) = exp(x) underflows before a large rate can restore it
        return tl.where(x < -60.0, -tl.exp(A_log + x), g)


@triton.jit(do_not_specialize=["elements"])
def gate_kernel(
    a,
    A_log,
    dt_bias,
    out,
    lower_bound,
    elements,
    a_row,
    ONE_VALUE: tl.constexpr,
    UNITS: tl.constexpr,
    PER_HEAD: tl.constexpr,
    SAFE: tl.constexpr,
    DOUBLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of ``out``, contiguous ``[rows, UNITS]``.

    ``a`` has contiguous rows ``a_row`` apart (0 where all are the same one), or with ``ONE_VALUE`` one value for all.
    ``PER_HEAD`` units share an ``A_log``. Without ``A_log`` (``None``) it is the gate of the update strength, doubled
    with ``DOUBLE``.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < elements
    unit = (at % UNITS).to(tl.int32)
    if ONE_VALUE:
        x = tl.load(a + tl.zeros_like(at), mask=inside, other=0.0).to(tl.float32)
    else:
        x = tl.load(a + at // UNITS * a_row + unit, mask=inside, other=0.0).to(tl.float32)
    if A_log is None:
        y = sigmoid(x)
        if DOUBLE:
            y *= 2.0
    else:
        x += tl.load(dt_bias + unit, mask=inside, other=0.0).to(tl.float32)
        log_rate = tl.load(A_log + unit // PER_HEAD, mask=inside, other=0.0).to(tl.float32)
        y = log_decay(x, log_rate, lower_bound, SAFE)
    tl.store(out + at, y, mask=inside)
