"""Matrix products of tiles."""

# mypy: ignore-errors
# (what @triton.jit makes of a function has no types)

import triton
import triton.language as tl


@triton.jit
def matmul(a, b, acc, PRECISION: tl.constexpr):
    """``acc + a @ b`` in FP32, ``acc`` possibly ``None`` for zero.

    Without tensor cores (``"ieee"``) every thread holds whole rows and columns of its operands, so they are taken 16 at
    a time.
    """
    DEPTH: tl.constexpr = a.shape[1]
    if PRECISION != "ieee" or DEPTH <= 16:
        return tl.dot(a, b, acc, input_precision=PRECISION)
    else:
        ROWS: tl.constexpr = a.shape[0]
        COLUMNS: tl.constexpr = b.shape[1]
        if acc is None:
            acc = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, DEPTH, 16):
            at = first + tl.arange(0, 16)
            left = tl.gather(a, tl.broadcast_to(at[None, :], (ROWS, 16)), 1)
            right = tl.gather(b, tl.broadcast_to(at[:, None], (16, COLUMNS)), 0)
            acc = tl.dot(left, right, acc, input_precision="ieee")
        return acc
