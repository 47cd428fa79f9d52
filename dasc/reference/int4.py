"""Two codes of four bits in a byte: how INT4 stores the temporal state (eq. 8 with codes from -7 to 7)."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_nibbles(codes: Tensor, v_dim: int) -> Tensor:
    """Put element ``j`` of the ``V`` axis in the low half of byte ``j``, element ``j + V / 2`` in its high half.

    Args:
        codes: int8 within -8 and 7, in two's complement.
        v_dim: its ``V`` axis, of even length.

    Returns:
        uint8, the ``V`` axis halved.

    Raises:
        ValueError: for an odd ``V``.
    """
    if codes.shape[v_dim] % 2:
        raise ValueError(f"codes must have an even number of elements in axis {v_dim}, got {list(codes.shape)}")
    low, high = (codes & 15).to(torch.uint8).chunk(2, dim=v_dim)
    return low | (high << 4)


def unpack_nibbles(packed: Tensor, v_dim: int) -> Tensor:
    """The inverse of :func:`pack_nibbles`: int8, the ``V`` axis doubled."""
    codes = torch.cat([packed & 15, packed >> 4], dim=v_dim).to(torch.int8)
    return torch.where(codes > 7, codes - 16, codes)
