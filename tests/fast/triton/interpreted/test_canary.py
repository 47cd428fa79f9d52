"""What the interpreter gets wrong, and why no interpreted test here has BF16 products: when it fails, rejoice."""

import torch
import triton
import triton.language as tl


@triton.jit
def dot_kernel(a, b, out, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at), input_precision="ieee"))


@triton.jit
def store_kernel(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + at).to(out.dtype.element_ty))


def product_error(dtype):
    """Of an interpreted ``tl.dot``, relative to the largest element."""
    gen = torch.Generator().manual_seed(0)
    a, b = (torch.randn(16, 16, generator=gen).to(dtype) for _ in range(2))
    out = torch.empty(16, 16)
    dot_kernel[(1,)](a, b, out, N=16)
    exact = a.double() @ b.double()
    return float((out - exact).abs().max() / exact.abs().max())


def test_products_in_fp32_and_fp16_are_right():
    assert product_error(torch.float32) < 1e-6
    assert product_error(torch.float16) < 1e-6


def test_products_in_bf16_are_wrong():
    assert not product_error(torch.bfloat16) < 0.1, "the interpreter multiplies BF16 now: interpret BF16 tests too"


def test_bf16_is_read_right_but_truncated_when_written():
    x = torch.tensor([1.0, 1.0 + 2**-8 + 2**-16, -3.0, 0.1])
    out = torch.empty(4, dtype=torch.bfloat16)
    store_kernel[(1,)](x, out, N=4)
    truncated = (x.view(torch.int32) & -65536).view(torch.float32)
    assert torch.equal(out.float(), truncated)
    assert not torch.equal(out, x.bfloat16()), "the interpreter rounds to BF16 now: compare BF16 results bit for bit"
    back = torch.empty(4)
    store_kernel[(1,)](x.bfloat16(), back, N=4)
    assert torch.equal(back, x.bfloat16().float())
