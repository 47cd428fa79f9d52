"""Reading named tensors with their shapes checked, so that none is missing, misshapen or left over."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class WeightReader:
    """Takes tensors by name and notes which were taken.

    Args:
        tensors: of a checkpoint, under the names that transformers writes.
        dtype: of the model.
        device: of the model.
    """

    def __init__(self, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self._tensors = tensors
        self._taken: set[str] = set()
        self.dtype = dtype
        self.wide_dtype = torch.promote_types(dtype, torch.float32)
        self.device = device

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str, *shape: int) -> Tensor:
        """A weight of exactly this shape, in the model's dtype.

        Raises:
            ValueError: when it is missing or of another shape.
        """
        return self._checked(name, shape).to(self.device, self.dtype)

    def take_wide(self, name: str, *shape: int) -> Tensor:
        """As :meth:`take` but in FP32 or better: for norms, routers and gates.

        Raises:
            ValueError: as :meth:`take`.
        """
        return self._checked(name, shape).to(self.device, self.wide_dtype)

    def take_heads(self, name: str, heads: int) -> Tensor:
        """The first ``heads`` numbers of a weight with any axes, ``[heads]``, in FP32 or better.

        KDA's ``A_log`` comes as ``[H]``, as ``[1, 1, H, 1]``, or longer than ``H``.

        Raises:
            ValueError: when it is missing or shorter.
        """
        flat = self._named(name).flatten()
        if len(flat) < heads:
            raise ValueError(f"{name} must hold at least {heads} numbers, got {len(flat)}")
        return flat[:heads].to(self.device, self.wide_dtype)

    def check_all_taken(self, ignored_prefix: str | None = None) -> None:
        """Raise if the checkpoint has tensors that the model did not take.

        Raises:
            ValueError: naming the first of them.
        """
        left = sorted(set(self._tensors) - self._taken)
        if ignored_prefix is not None:
            left = [name for name in left if not name.startswith(ignored_prefix)]
        if left:
            raise ValueError(f"weights hold {len(left)} tensors that the configuration does not know, first {left[0]}")

    def _named(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise ValueError(f"weights must hold {name}, which is missing")
        self._taken.add(name)
        return self._tensors[name]

    def _checked(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = self._named(name)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be {list(shape)}, got {list(tensor.shape)}")
        return tensor


class Linear:
    """``y = x W^T + b`` with ``W`` ``[out, in]``."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    @classmethod
    def read(cls, weights: WeightReader, name: str, out: int, inner: int, *, bias: bool = False) -> Linear:
        """Take ``name.weight`` ``[out, inner]`` and, if asked for, ``name.bias``.

        Raises:
            ValueError: as :meth:`WeightReader.take`.
        """
        return cls(weights.take(f"{name}.weight", out, inner), weights.take(f"{name}.bias", out) if bias else None)

    def __call__(self, x: Tensor) -> Tensor:
        """Apply to ``[.., in]``."""
        return torch.nn.functional.linear(x, self.weight, self.bias)

    def rows(self, index: Tensor) -> Linear:
        """The same map with its outputs picked and ordered by ``index``."""
        return Linear(self.weight[index], None if self.bias is None else self.bias[index])


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, computed in the dtype of ``weight`` and returned in that of ``x``."""
    return torch.nn.functional.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)
