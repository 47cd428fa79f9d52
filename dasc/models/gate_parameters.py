"""The decay parameters of a model, as its checkpoint stores them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dasc.geometry import StateGeometry

GateKind = Literal["softplus", "safe"]


@dataclass(frozen=True, eq=False)
class GateParameters:
    """Stored decay parameters of the recurrent layers, cast exactly to FP64.

    Attributes:
        gate: ``"softplus"`` (``g = -exp(A_log) * softplus(a + dt_bias)``) or ``"safe"``
            (``g = lower_bound * sigmoid(exp(A_log) * (a + dt_bias))``), eq. 2.
        lower_bound: of the safe gate, negative; ``None`` for softplus.
        A_log: ``[L, HV]`` float64.
        dt_bias: ``[L, HV]`` float64 for GDN, ``[L, HV, K]`` for KDA.
    """

    gate: GateKind
    lower_bound: float | None
    A_log: Tensor
    dt_bias: Tensor

    def __post_init__(self) -> None:
        if self.gate not in ("softplus", "safe"):
            raise ValueError(f"gate must be 'softplus' or 'safe', got {self.gate!r}")
        if self.gate == "softplus" and self.lower_bound is not None:
            raise ValueError(f"the softplus gate has no lower bound, got {self.lower_bound}")
        if self.gate == "safe" and (self.lower_bound is None or not -1e6 < self.lower_bound < 0):
            raise ValueError(f"the safe gate needs a negative, finite lower bound, got {self.lower_bound}")
        for name in ("A_log", "dt_bias"):
            tensor = getattr(self, name)
            if tensor.dtype != torch.float64:
                raise ValueError(f"{name} must be float64, got {tensor.dtype}")
            if not torch.isfinite(tensor).all():
                raise ValueError(f"{name} holds NaN or infinity")
        if self.A_log.ndim != 2 or self.dt_bias.ndim not in (2, 3) or self.dt_bias.shape[:2] != self.A_log.shape:
            raise ValueError(
                "A_log must be [L, HV] and dt_bias [L, HV] or [L, HV, K], "
                f"got {list(self.A_log.shape)} and {list(self.dt_bias.shape)}"
            )

    def check_geometry(self, geometry: StateGeometry) -> None:
        """Raise unless these parameters have the layers, heads and channels of ``geometry``.

        Raises:
            ValueError: with the expected and the found shapes.
        """
        heads = (geometry.num_layers, geometry.num_value_heads)
        bias = heads if geometry.kind == "gdn" else (*heads, geometry.head_k_dim)
        if tuple(self.A_log.shape) != heads or tuple(self.dt_bias.shape) != bias:
            raise ValueError(
                f"expected A_log {list(heads)} and dt_bias {list(bias)} for {geometry.family}, "
                f"got {list(self.A_log.shape)} and {list(self.dt_bias.shape)}"
            )

    def fingerprint(self) -> str:
        """``"sha256:..."`` of the parameters' *values*: the same whatever dtype stored them without loss."""
        digest = hashlib.sha256(f"{self.gate} {self.lower_bound!r}".encode())
        for tensor in (self.A_log, self.dt_bias):
            digest.update(repr(list(tensor.shape)).encode())
            # + 0.0 makes the two zeros one; FP64 little-endian is the canonical form
            digest.update((tensor + 0.0).contiguous().cpu().numpy().astype("<f8").tobytes())
        return f"sha256:{digest.hexdigest()}"
