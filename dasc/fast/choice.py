"""Which implementation runs. The choice is explicit: what was asked for runs, or an error says why it cannot."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

Impl = Literal["auto", "cpu", "triton"]


def chosen_impl(impl: Impl = "auto", device: torch.device | str = "cpu") -> Literal["cpu", "triton"]:
    """The implementation that a call with ``impl`` runs for tensors on ``device``.

    ``"auto"`` follows the tensors and nothing else: those on the CPU go to ``"cpu"``, all others need ``"triton"``.
    There is no fallback from one to another. ``"triton"`` takes tensors on the CPU only where Triton interprets its
    kernels (``TRITON_INTERPRET=1`` before they are first imported), which is for tests.

    Raises:
        ValueError: when that implementation cannot run, with the reason.
    """
    kind = torch.device(device).type
    if impl not in ("auto", "cpu", "triton"):
        raise ValueError(f"impl must be 'auto', 'cpu' or 'triton', got {impl!r}")
    if kind == "cpu" and impl != "triton":
        return "cpu"
    if impl == "cpu":
        raise ValueError(f"impl 'cpu' cannot run for tensors on {kind!r}: it takes tensors on the CPU")
    reason = _why_not_triton(torch.device(device))
    if reason is not None:
        raise ValueError(f"impl {impl!r} cannot run for tensors on {kind!r}: {reason}")
    return "triton"


def implementation(impl: Impl, like: Tensor) -> Any:
    """The module that runs a call with ``impl``, for tensors where ``like`` is.

    What is no tensor is for the function's own checks to refuse.

    Raises:
        ValueError: as :func:`chosen_impl`.
    """
    device = like.device if isinstance(like, Tensor) else torch.device("cpu")
    return importlib.import_module(f"dasc.fast.{chosen_impl(impl, device)}")


def _why_not_triton(device: torch.device) -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed; pip install 'dasc[triton]'"
    reason: str | None = importlib.import_module("dasc.fast.triton.availability").why_not(device)
    return reason
