"""Which implementation runs. The choice is explicit: what was asked for runs, or an error says why it cannot."""

from __future__ import annotations

from typing import Literal

import torch

Impl = Literal["auto", "cpu", "triton"]
_NO_TRITON = "dasc.fast has no Triton kernels yet, only the CPU path"


def chosen_impl(impl: Impl = "auto", device: torch.device | str = "cpu") -> Literal["cpu"]:
    """The implementation that a call with ``impl`` runs for tensors on ``device``.

    ``"auto"`` follows the tensors and nothing else: those on the CPU go to ``"cpu"``, all others need ``"triton"``.
    There is no fallback from one to another.

    Raises:
        ValueError: when that implementation cannot run, with the reason.
    """
    kind = torch.device(device).type
    if impl not in ("auto", "cpu", "triton"):
        raise ValueError(f"impl must be 'auto', 'cpu' or 'triton', got {impl!r}")
    if impl == "triton":
        raise ValueError(f"impl 'triton' cannot run: {_NO_TRITON}")
    if kind != "cpu":
        reason = _NO_TRITON if impl == "auto" else "it takes tensors on the CPU"
        raise ValueError(f"impl {impl!r} cannot run for tensors on {kind!r}: {reason}")
    return "cpu"
