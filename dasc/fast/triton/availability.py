"""Whether the kernels can run on a device, and why not."""

from __future__ import annotations

import torch
import triton

MIN_CAPABILITY = (9, 0)  # what the kernels are laid out and compiled for in tests


@triton.jit  # type: ignore[untyped-decorator]
def _probe() -> None:
    """Is compiled or interpreted as every other kernel of this process."""


INTERPRETED = not isinstance(_probe, triton.JITFunction)


def why_not(device: torch.device) -> str | None:
    """The reason why the kernels cannot run for tensors on ``device``; ``None`` when they can."""
    if INTERPRETED:
        if device.type == "cpu":
            return None
        return f"TRITON_INTERPRET=1 is set, and interpreted kernels take tensors on the CPU, not on {device.type!r}"
    if device.type == "cpu":
        return "Triton needs a GPU; TRITON_INTERPRET=1, set before the start, interprets the kernels on the CPU"
    if device.type != "cuda" or torch.version.hip is not None:
        return "the kernels are written for NVIDIA GPUs"
    if not torch.cuda.is_available():
        return "no CUDA device is available"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"the kernels need compute capability {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}, got {capability}"
    return None
