"""Checks of single tensors that the contract is made of."""

from __future__ import annotations

import torch
from torch import Tensor


def expect_shape(name: str, tensor: Tensor, shape: tuple[int, ...], axes: str) -> None:
    """``ValueError`` unless ``tensor`` is ``shape``, which ``axes`` names."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must be {axes} = {list(shape)}, got {list(tensor.shape)}")


def expect_device(name: str, tensor: Tensor, device: torch.device) -> None:
    """``ValueError`` unless ``tensor`` is where ``q`` is."""
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device} like q, got {tensor.device}")


def expect_integers(name: str, tensor: Tensor, count: int, device: torch.device) -> None:
    """``ValueError`` unless ``tensor`` is int32 or int64 ``[count]`` on ``device``."""
    if (
        not isinstance(tensor, Tensor)
        or tensor.dtype not in (torch.int32, torch.int64)
        or tuple(tensor.shape) != (count,)
        or tensor.device != device
    ):
        got = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}" if isinstance(tensor, Tensor) else type(tensor)
        raise ValueError(f"{name} must be int32 or int64 [{count}] on {device}, got {got}")


def expect_slots(indices: Tensor, slots: int, lowest: int = -1, name: str = "state_indices") -> None:
    """``ValueError`` unless ``indices`` are from ``lowest`` to ``slots - 1`` and none but negative ones comes twice."""
    listed = indices.tolist()
    real = [index for index in listed if index >= 0]
    if any(not lowest <= index < slots for index in listed) or len(set(real)) < len(real):
        raise ValueError(f"{name} must be distinct and from {lowest} to {slots - 1}, got {listed}")


def expect_stored(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """``ValueError`` unless ``tensor`` is ``shape`` of ``dtype``."""
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ValueError(f"{name} must be {dtype} {list(shape)}, got {tensor.dtype} {list(tensor.shape)}")
