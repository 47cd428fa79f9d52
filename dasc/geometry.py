"""The shape of a model's recurrent state: what one checkpoint holds, unit by unit and byte by byte."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["gdn", "kda"]
Quantization = Literal["int8", "int4"]
QUANTIZATIONS: tuple[Quantization, ...] = ("int8", "int4")


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``"float32"``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class DtypePolicy:
    """How the parts of a checkpoint are stored.

    Attributes:
        temporal: dtype of the active temporal state, of stored units that are not quantised, and of scales.
        conv: dtype of the convolution rows, stored as they are in every layout.
        quantized: store retained units as symmetric codes of 8 or 4 bits with scales (eq. 8); exactly when ``None``.
    """

    temporal: torch.dtype = torch.float32
    conv: torch.dtype = torch.bfloat16
    quantized: Quantization | None = None

    def __post_init__(self) -> None:
        for name in ("temporal", "conv"):
            dtype = getattr(self, name)
            if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
                raise ValueError(f"{name} must be a floating-point torch dtype, got {dtype!r}")
        if self.quantized not in (None, *QUANTIZATIONS):
            raise ValueError(f"quantized must be None, 'int8' or 'int4', got {self.quantized!r}")

    @property
    def stored_temporal(self) -> torch.dtype:
        """Dtype of stored units: one value an element, in INT4 two codes a byte."""
        if self.quantized is None:
            return self.temporal
        return torch.int8 if self.quantized == "int8" else torch.uint8

    @property
    def stored_name(self) -> str:
        """Name of what units are stored as: ``"int8"``, ``"int4"``, or of the temporal dtype."""
        return self.quantized or dtype_name(self.temporal)


@dataclass(frozen=True)
class StateGeometry:
    """The recurrent state of one model, or of one tensor-parallel rank of it (see :meth:`shard`).

    A *unit* is what selection keeps or drops: a value head for GDN, a key channel ``(head, k)`` for KDA. Units of a
    layer are numbered head-major, ``u = h`` or ``u = h * K + k``.

    Attributes:
        family: registry name of the model family, e.g. ``"kimi_linear"``.
        kind: ``"gdn"`` (one decay a head) or ``"kda"`` (one decay a key channel).
        num_blocks: all blocks of the model, recurrent or not.
        recurrent_layers: 0-based block numbers of the ``L`` recurrent layers, ascending.
        num_value_heads: ``HV``.
        num_key_heads: ``H``; divides ``HV``. Value head ``h`` reads key head ``h // (HV // H)``.
        head_v_dim: ``V``.
        head_k_dim: ``K``.
        conv_width: taps of the short causal convolution; a checkpoint carries ``conv_width - 1`` rows of it.
    """

    family: str
    kind: Kind
    num_blocks: int
    recurrent_layers: tuple[int, ...]
    num_value_heads: int
    num_key_heads: int
    head_v_dim: int
    head_k_dim: int
    conv_width: int = 4

    def __post_init__(self) -> None:
        if not isinstance(self.family, str):
            raise ValueError(f"family must be a string, got {self.family!r}")
        if self.kind not in ("gdn", "kda"):
            raise ValueError(f"kind must be 'gdn' or 'kda', got {self.kind!r}")
        for name in ("num_blocks", "num_value_heads", "num_key_heads", "head_v_dim", "head_k_dim", "conv_width"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"value heads must be a multiple of key heads, got {self.num_value_heads} and {self.num_key_heads}"
            )
        layers = tuple(self.recurrent_layers)
        object.__setattr__(self, "recurrent_layers", layers)
        if not layers:
            raise ValueError(f"family {self.family!r}: the model has no recurrent layers")
        if any(type(layer) is not int for layer in layers):
            raise ValueError(f"recurrent layers must be integers, got {layers}")
        if list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= self.num_blocks:
            raise ValueError(
                f"recurrent layers must be distinct, ascending and within [0, {self.num_blocks}), got {layers}"
            )

    @property
    def num_layers(self) -> int:
        """``L``, recurrent layers only."""
        return len(self.recurrent_layers)

    @property
    def bundle(self) -> int:
        """``B`` of appendix B.1: adjacent value heads that share a key head and move together."""
        return self.num_value_heads // self.num_key_heads

    @property
    def units_per_head(self) -> int:
        return 1 if self.kind == "gdn" else self.head_k_dim

    @property
    def units_per_layer(self) -> int:
        """``n_l``, equal in every layer."""
        return self.num_value_heads * self.units_per_head

    @property
    def num_units(self) -> int:
        return self.num_layers * self.units_per_layer

    @property
    def unit_shape(self) -> tuple[int, ...]:
        """Shape of one unit: ``(V, K)`` for a GDN head, ``(V,)`` for a KDA channel (appendix B)."""
        return (self.head_v_dim, self.head_k_dim) if self.kind == "gdn" else (self.head_v_dim,)

    @property
    def unit_elements(self) -> int:
        return self.head_v_dim * (self.head_k_dim if self.kind == "gdn" else 1)

    @property
    def value_axis(self) -> int:
        """The ``V`` axis of units, from the end."""
        return -2 if self.kind == "gdn" else -1

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of one quantised unit's scales, one for each ``(layer, head, k)`` (eq. 8): ``(K,)`` or ``()``."""
        return (self.head_k_dim,) if self.kind == "gdn" else ()

    @property
    def scales_per_unit(self) -> int:
        """Scales of one quantised unit."""
        return math.prod(self.scale_shape)

    def stored_unit_shape(self, dtypes: DtypePolicy) -> tuple[int, ...]:
        """Shape of one stored unit in ``dtypes.stored_temporal``: its own, in INT4 with half of ``V``.

        Byte ``j`` of INT4 holds element ``j`` of ``V`` in its low half and element ``j + V / 2`` in its high half.

        Raises:
            ValueError: for INT4 and an odd ``V``.
        """
        V, *rest = self.unit_shape
        if dtypes.quantized != "int4":
            return (V, *rest)
        if V % 2:
            raise ValueError(f"head_v_dim must be even for INT4, got {V}")
        return (V // 2, *rest)

    def stored_unit_bytes(self, dtypes: DtypePolicy) -> int:
        """Bytes of one stored unit, without its scales.

        Raises:
            ValueError: as :meth:`stored_unit_shape`.
        """
        return math.prod(self.stored_unit_shape(dtypes)) * dtypes.stored_temporal.itemsize

    def unit_scale_bytes(self, dtypes: DtypePolicy) -> int:
        """Bytes of one stored unit's scales; 0 unless it is quantised."""
        return 0 if dtypes.quantized is None else self.scales_per_unit * dtypes.temporal.itemsize

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """``[L, HV, V, K]``, the temporal state of one checkpoint."""
        return (self.num_layers, self.num_value_heads, self.head_v_dim, self.head_k_dim)

    @property
    def conv_segments(self) -> tuple[int, int, int]:
        """Channels of the q, k and v segments of the convolution, each sharded over the ranks on its own."""
        key = self.num_key_heads * self.head_k_dim
        return (key, key, self.num_value_heads * self.head_v_dim)

    @property
    def conv_channels(self) -> int:
        return sum(self.conv_segments)

    @property
    def conv_shape(self) -> tuple[int, int, int]:
        """``[L, channels, conv_width - 1]``, the convolution state of one checkpoint."""
        return (self.num_layers, self.conv_channels, self.conv_width - 1)

    def temporal_bytes(self, dtypes: DtypePolicy = DtypePolicy()) -> int:
        """Bytes of the dense temporal state (``B_temp`` of eq. 6), never quantised."""
        return self.num_units * self.unit_elements * dtypes.temporal.itemsize

    def conv_bytes(self, dtypes: DtypePolicy = DtypePolicy()) -> int:
        """Bytes of the convolution rows (``B_conv`` of eq. 6)."""
        layers, channels, rows = self.conv_shape
        return layers * channels * rows * dtypes.conv.itemsize

    def dense_bytes(self, dtypes: DtypePolicy = DtypePolicy()) -> int:
        """Bytes of a dense checkpoint: temporal and convolution."""
        return self.temporal_bytes(dtypes) + self.conv_bytes(dtypes)

    def check_ranks(self, ranks: int) -> None:
        """Raise unless every rank gets the same whole number of key heads (and so of bundles).

        Raises:
            ValueError: naming the heads and the ranks.
        """
        if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
            raise ValueError(f"tensor-parallel degree must be a positive integer, got {ranks!r}")
        if self.num_key_heads % ranks:
            raise ValueError(
                f"{self.family}: {self.num_key_heads} key heads ({self.num_value_heads} value heads) "
                f"cannot be shared equally by {ranks} ranks"
            )

    def shard(self, ranks: int) -> StateGeometry:
        """The geometry of one rank of ``ranks``: contiguous blocks of heads, the same number on each rank.

        Raises:
            ValueError: when the key heads do not divide evenly.
        """
        self.check_ranks(ranks)
        return dataclasses.replace(
            self, num_value_heads=self.num_value_heads // ranks, num_key_heads=self.num_key_heads // ranks
        )
