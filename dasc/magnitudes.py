"""Observed magnitudes of a model's units, which selection can go by in place of the horizons of its weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dasc.models import Checkpoint

_FIELDS = ("fingerprint", "source", "magnitudes")


@dataclass(frozen=True, eq=False)
class UnitMagnitudes:
    """How large the units of a model's states are on prompts like those that it will serve.

    Attributes:
        values: float64 ``[L, U]``, root mean square over prefixes of ``M_S`` (eq. 5), finite and not negative. Its
            square is the squared error of the states that omitting the unit costs on average, so that of all masks of
            a size the one with the largest units has the least.
        fingerprint: of the decay parameters of the model that was observed, as a plan's.
        source: what was observed, as plain JSON values.

    Raises:
        ValueError: for values of another dtype, shape or range.
    """

    values: Tensor
    fingerprint: str
    source: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.values.dtype != torch.float64 or self.values.ndim != 2:
            raise ValueError(f"magnitudes must be float64 [L, U], got {self.values.dtype} {list(self.values.shape)}")
        if not (self.values.isfinite() & (self.values >= 0)).all():
            raise ValueError("magnitudes must be finite and not negative")

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, which :meth:`load` reads."""
        return {"fingerprint": self.fingerprint, "source": dict(self.source), "magnitudes": self.values.tolist()}

    def sha256(self) -> str:
        """Of :meth:`as_dict`."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()

    @classmethod
    def load(cls, path: Path) -> UnitMagnitudes:
        """Read a file of JSON that holds :meth:`as_dict`; what else it holds is ignored.

        Raises:
            ValueError: naming the file, for one that holds no magnitudes.
            OSError: when it cannot be read.
        """
        try:
            found = json.loads(path.read_text())
            fingerprint, source, rows = (found[name] for name in _FIELDS)
            if not isinstance(fingerprint, str) or not isinstance(source, dict):
                raise TypeError("the fingerprint must be text and the source an object")
            return cls(torch.tensor(rows, dtype=torch.float64), fingerprint, source)
        except (ValueError, TypeError, KeyError, RuntimeError) as error:
            raise ValueError(f"{path} holds no magnitudes, as dasc observe writes them ({error})") from error

    def check(self, checkpoint: Checkpoint) -> None:
        """Raise unless these are of the units and weights of ``checkpoint``.

        Raises:
            ValueError: saying what differs.
        """
        geometry = checkpoint.geometry
        units = [geometry.num_layers, geometry.units_per_layer]
        if list(self.values.shape) != units:
            raise ValueError(f"magnitudes must be {units} for this model, got {list(self.values.shape)}")
        if self.fingerprint != (own := checkpoint.gate.fingerprint()):
            raise ValueError(f"magnitudes were observed of the weights {self.fingerprint}, the model has {own}")
