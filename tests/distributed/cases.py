"""Models, plans and pools that the ranks of a test build for themselves, and an oracle of what slots must hold."""

import dataclasses
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from dasc.contract import DenseState, PackedState
from dasc.geometry import DtypePolicy, Quantization, StateGeometry
from dasc.layout import RaggedLayout
from dasc.placement import PlacementMode
from dasc.plan import SelectionPlan
from dasc.reference import pack_slots, place
from tests.masks import KIMI_LINEAR, kimi_linear_mask

FINGERPRINT = "sha256:" + "0" * 64
# The published geometries, with small heads; only Kimi-Linear's K must stay, for its retained counts.
KDA = dataclasses.replace(KIMI_LINEAR, head_v_dim=2)
GDN = StateGeometry("qwen3_next", "gdn", 48, tuple(b for b in range(48) if b % 4 != 3), 32, 16, 4, 5)


@dataclass(frozen=True)
class Case:
    """What to store, and how.

    Attributes:
        mask: ``real``; ``even``, the same on all ranks; ``lumps`` that no order of the heads evens out.
        strided: pools whose axes lie in another order, and slots with gaps between them.
        broken: one unit of every state holds NaN, another infinity.
    """

    kind: Literal["gdn", "kda"]
    quantized: Quantization | None = None
    mode: PlacementMode = "storage"
    mask: Literal["real", "even", "lumps"] = "real"
    strided: bool = False
    broken: bool = False
    omitted: Literal["zero", "leave"] = "zero"
    temporal: torch.dtype = torch.float32


def mask_of(case: Case) -> Tensor:
    """``real`` is Kimi-Linear's published counts, or Qwen3-Next with fewer and fewer heads retained by the ranks."""
    geometry = GDN if case.kind == "gdn" else KDA
    if case.mask == "even":
        return (torch.arange(geometry.num_units) % 2 == 0).view(geometry.num_layers, -1)
    if case.mask == "lumps":  # one whole bundle in each of three layers, nothing else
        mask = torch.zeros(
            geometry.num_layers, geometry.num_key_heads, geometry.units_per_layer // geometry.num_key_heads
        )
        mask[:3, 0] = 1
        return mask.flatten(1).bool()
    if case.kind == "kda":
        return kimi_linear_mask()
    draws = torch.rand(GDN.num_layers, GDN.num_value_heads, generator=torch.Generator().manual_seed(0))
    return draws < torch.linspace(0.9, 0.1, GDN.num_value_heads)


@cache
def plan_of(case: Case, world: int) -> SelectionPlan:
    mask = mask_of(case)
    geometry = GDN if case.kind == "gdn" else KDA
    return SelectionPlan(
        family=geometry.family,
        geometry=geometry,
        epsilon=1e-3,
        gate_input=-0.3,
        w_max=16,
        mask=mask,
        windows=torch.where(mask, 0, 16),
        fingerprint=FINGERPRINT,
        placements={world: place(geometry, mask, world, case.mode)},
        dtypes=DtypePolicy(temporal=case.temporal, quantized=case.quantized),
    )


def own_layout(plan: SelectionPlan, world: int, rank: int) -> RaggedLayout:
    """A slot with room for exactly what the rank computes."""
    layout = plan.layouts(world)[rank]
    return RaggedLayout.from_mask(layout.geometry, layout.mask, layout.dtypes)


def native_pool(case: Case, layout: RaggedLayout, slots: int, seed: int) -> DenseState:
    geometry, dtypes = layout.geometry, layout.dtypes
    L, HV, V, K = geometry.state_shape
    _, channels, rows = geometry.conv_shape
    gen = torch.Generator().manual_seed(seed)
    temporal = torch.randn(L, slots, HV, V, K, generator=gen).to(dtypes.temporal)
    conv = torch.randn(L, slots, channels, rows, generator=gen).to(dtypes.conv)
    if case.broken:
        units = temporal.mT if geometry.kind == "kda" else temporal
        for n, value in enumerate((torch.nan, -torch.inf)):
            layer, unit = divmod(int(layout.unit_index[-1 - 7 * n]), geometry.units_per_layer)
            head, k = divmod(unit, geometry.units_per_head)
            units[layer, :, head, k, -1] = value
    if case.strided:
        temporal = temporal.permute(1, 0, 2, 4, 3).contiguous().permute(1, 0, 2, 4, 3)
        conv = conv.mT.contiguous().mT
    return DenseState(temporal, conv)


def poisoned_slots(case: Case, layout: RaggedLayout, slots: int) -> PackedState:
    """A pool of slots that nothing was ever written to."""
    geometry, dtypes = layout.geometry, layout.dtypes
    L, channels, rows = geometry.conv_shape
    scale_shape = (geometry.head_k_dim,) if geometry.kind == "gdn" else ()

    def filled(dtype: torch.dtype, *shape: int) -> Tensor:
        poison = torch.nan if dtype.is_floating_point else 99
        if case.strided:
            return torch.full((shape[1], shape[0], *shape[2:], 2), poison, dtype=dtype)[..., 1].transpose(0, 1)
        return torch.full(shape, poison, dtype=dtype)

    return PackedState(
        filled(dtypes.stored_temporal, slots, layout.slot_units, *geometry.stored_unit_shape(dtypes)),
        filled(dtypes.conv, L, slots, channels, rows),
        filled(dtypes.temporal, slots, layout.slot_units, *scale_shape) if dtypes.quantized else None,
    )


def stored_oracle(
    plan: SelectionPlan, world: int, rank: int, natives: list[DenseState], native_slots: Tensor
) -> PackedState:
    """What the slots of ``rank`` hold after a store, one move after another, from the pools of all ranks."""
    placement, n = plan.placements[world], len(native_slots)
    packed = []
    for native, source in zip(natives, range(world)):
        layout = own_layout(plan, world, source)
        own = poisoned_slots(Case("kda"), layout, n)
        pack_slots(native, native_slots, own, torch.arange(n), layout)
        packed.append(own)
    kept = min(placement.local_units[rank], placement.stored_units[rank])

    def assembled(parts: list[Tensor]) -> Tensor:
        slots = parts[rank].new_zeros(n, plan.layouts(world)[rank].slot_units, *parts[rank].shape[2:])
        slots[:, :kept] = parts[rank][:, :kept]
        for source, unit, destination, position in placement.moves.tolist():
            if destination == rank:
                slots[:, position] = parts[source][:, unit]
        return slots

    return PackedState(
        assembled([own.temporal for own in packed]),
        packed[rank].conv,
        assembled([own.scales for own in packed]) if plan.dtypes.quantized else None,
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equality that takes NaN for itself."""
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
