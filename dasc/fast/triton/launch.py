"""What all wrappers do before they launch a kernel."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

# Streaming multiprocessors of an H200: fewer programs leave some idle.
SMS = 132
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_dtypes(**tensors: Tensor | None) -> None:
    """The kernels compute in FP32.

    Raises:
        ValueError: naming the first tensor of another dtype than FP32, BF16 and FP16.
    """
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in KERNEL_DTYPES:
            raise ValueError(f"{name} must be float32, bfloat16 or float16 for impl 'triton', got {tensor.dtype}")


def token_rows(x: Tensor) -> Tensor:
    """``[B, T, ..]`` to ``[B * T, ..]`` with a contiguous last axis: a view, or a copy where strides allow none."""
    x = x.flatten(0, 1)
    return x if x.stride(-1) == 1 else x.contiguous()


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
