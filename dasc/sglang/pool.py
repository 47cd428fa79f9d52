"""The compressed checkpoint pool, with the interface of SGLang's int8 pool, which it takes the place of."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from sglang.srt.mem_cache.allocator.mamba import MambaSlotAllocator
from torch import Tensor

from dasc.cache.counters import Counters
from dasc.contract import DenseState, zero_slots
from dasc.fast import pack_slots, unpack_slots
from dasc.layout import Layout

NO_CONTEXT = nullcontext()


class CompressedPool:
    """Compressed checkpoints of one rank in slots ``1 .. num_slots``; slot 0 is reserved.

    Stores and loads go straight between SGLang's tensors and the slots, on the caller's stream. The caller owns the
    slots that ``alloc`` gave it until ``free`` or ``clear``.

    Attributes:
        num_slots: usable slots.
        layout: of this rank.
        store: the slots.
        counters: what was loaded and dropped. Whether the tree takes what is stored is not known here.

    Args:
        layout: of this rank; its slot has room for every unit that it retains.
        num_slots: usable slots.
        device: of SGLang's pool.
        counters: where to count.
        omitted: the units that were not stored become zero in a load (NR), or are left as they are (WR).
        memory: in which the slots are allocated.
    """

    def __init__(
        self,
        layout: Layout,
        num_slots: int,
        device: torch.device | str,
        counters: Counters,
        *,
        omitted: Literal["zero", "leave"] = "zero",
        memory: AbstractContextManager[object] = NO_CONTEXT,
    ) -> None:
        self.num_slots = num_slots
        self.layout = layout
        self.counters = counters
        with memory:
            self.store = zero_slots(layout, num_slots + 1, device)
        self._slots = MambaSlotAllocator(size=num_slots, device=str(device))
        self.being_dropped = False
        self._omitted = omitted

    def alloc(self, n: int = 1) -> Tensor | None:
        """``n`` free slots, int64 ``[n]``, or ``None`` when fewer are free."""
        slots: Tensor | None = self._slots.alloc(n)
        return slots

    def free(self, slots: Tensor) -> None:
        """Take slots back; what they hold is gone."""
        if self.being_dropped:
            self.counters.not_cached["duplicate"] += len(slots)
        else:
            self.counters.evictions["compressed"] += len(slots)
        self._slots.free(slots)

    def is_compressed(self, slot: Tensor) -> bool:
        """Whether a load of ``slot`` leaves units out: of all that are here."""
        return True

    def available_size(self) -> int:
        """Free slots."""
        return int(self._slots.available_size())

    def clear(self) -> None:
        """Take all slots back."""
        self._slots.clear()

    def mem_usage_bytes(self) -> int:
        """Bytes of the slots, the reserved one included."""
        return sum(part.nbytes for part in self.store if part is not None)

    def occupancy(self) -> dict[str, float]:
        """Present values by name."""
        return {
            "compressed_slots": self.num_slots,
            "compressed_slots_held": self.num_slots - self.available_size(),
            "compressed_bytes": self.mem_usage_bytes(),
        }

    def store_from_active(self, mamba_pool: Any, active_slots: Tensor, ckpt_slots: Tensor) -> None:
        """Compress the states in ``active_slots`` of SGLang's pool into ``ckpt_slots``."""
        pack_slots(native_state(mamba_pool), active_slots.view(-1), self.store, ckpt_slots.view(-1), self.layout)

    def load_to_active(self, mamba_pool: Any, ckpt_slots: Tensor, active_slots: Tensor) -> None:
        """Restore ``ckpt_slots`` into ``active_slots``."""
        unpack_slots(
            self.store,
            ckpt_slots.view(-1),
            native_state(mamba_pool),
            active_slots.view(-1),
            self.layout,
            omitted=self._omitted,
        )
        self.counters.hits["compressed"] += ckpt_slots.numel()


def native_state(mamba_pool: Any) -> DenseState:
    """SGLang's pool of active states as dasc's functions read it: the same memory, rows after channels."""
    cache = mamba_pool.mamba_cache
    (conv,) = cache.conv
    return DenseState(cache.temporal, conv.mT if mamba_pool.conv_slice_axis == 1 else conv)
