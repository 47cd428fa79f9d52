"""``DASC_PLACEMENT``: checkpoints whose units are balanced over the ranks of tensor parallelism (appendix B.1)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dasc.cache.counters import Counters
from dasc.fast.distributed import ExchangeError, Routes, StorageExchange, row_bytes
from dasc.layout import Layout
from dasc.plan import SelectionPlan
from dasc.sglang.permutation import HeadPermutation
from dasc.sglang.pool import NO_CONTEXT, CompressedPool, native_state
from dasc.sglang.refusing import stop

LOAD_BATCH = 8
"""Checkpoints that one all-to-all of loads carries. SGLang loads those of a batch together and stores one by one."""


class Exchanges(NamedTuple):
    """One rank's ends. Stores and loads may run on different streams, so each communicates over a group of its own."""

    stores: StorageExchange
    loads: StorageExchange

    @classmethod
    def over(cls, plan: SelectionPlan, group: Any, device: str, timeout_s: int | None) -> Exchanges:
        """Between the ranks of an SGLang ``GroupCoordinator``, which must all call this.

        Args:
            timeout_s: how long to wait for another rank; torch's default when ``None``.

        Raises:
            RanksDisagreeError: for ranks with different plans.
            ExchangeError: when a rank is gone or late.
        """
        timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        ends = []
        for batch in (1, LOAD_BATCH):
            own = dist.new_group(group.ranks, timeout, dist.get_backend(group.device_group))
            ends.append(StorageExchange(plan, own, max_batch=batch, device=device))
        return cls(*ends)


def buffer_bytes(plan: SelectionPlan, ranks: int) -> int:
    """Bytes of the buffers of :class:`Exchanges` on the rank that has the most; 0 when nothing moves."""
    if not moves_units(plan, ranks):
        return 0
    routes = [Routes.of(plan.placements[ranks], rank) for rank in range(ranks)]
    units = max(r.sent.count + r.received.count for r in routes)
    return (1 + LOAD_BATCH) * units * row_bytes(plan.layouts(ranks)[0])


def moves_units(plan: SelectionPlan, ranks: int) -> bool:
    """Whether some rank stores units that another computes."""
    return ranks in plan.placements and plan.placements[ranks].moved_units > 0


class BalancedPool(CompressedPool):
    """A :class:`CompressedPool` whose stores and loads exchange units between the ranks.

    All ranks make the same calls in the same order, as SGLang's schedulers do: they decide alike, and each issues
    stores and loads from one thread. A rank that finds another gone or late stops the server with one line.

    Args:
        layout: as for :class:`CompressedPool`; its slot may have less room than this rank's units take.
        exchanges: of this rank.
    """

    def __init__(
        self,
        layout: Layout,
        num_slots: int,
        device: torch.device | str,
        counters: Counters,
        exchanges: Exchanges,
        *,
        omitted: Literal["zero", "leave"] = "zero",
        memory: AbstractContextManager[object] = NO_CONTEXT,
    ) -> None:
        super().__init__(layout, num_slots, device, counters, omitted=omitted, memory=memory)
        self.exchanges = exchanges

    def store_from_active(self, mamba_pool: Any, active_slots: Tensor, ckpt_slots: Tensor) -> None:
        """Compress the states in ``active_slots`` of SGLang's pool into ``ckpt_slots``, on all ranks."""
        native = native_state(mamba_pool)
        _or_stop(self.exchanges.stores.store, native, active_slots.view(-1), self.store, ckpt_slots.view(-1))

    def load_to_active(self, mamba_pool: Any, ckpt_slots: Tensor, active_slots: Tensor) -> None:
        """Restore ``ckpt_slots`` into ``active_slots``, on all ranks."""
        load = functools.partial(self.exchanges.loads.load, omitted=self._omitted)
        _or_stop(load, self.store, ckpt_slots.view(-1), native_state(mamba_pool), active_slots.view(-1))
        self.counters.hits["compressed"] += ckpt_slots.numel()


def _or_stop(exchange: Callable[..., None], *arguments: Any) -> None:
    try:
        exchange(*arguments)
    except ExchangeError as error:
        stop(error)


def permute_as_loaded(model: Any, permutation: HeadPermutation, started: Callable[[], bool]) -> None:
    """Make ``model.load_weights`` permute the heads of all weights that it is ever given, and let none out.

    Args:
        model: SGLang's, before its weights load.
        permutation: of its heads.
        started: whether they have loaded. A weight that cannot be permuted stops the server before; afterwards SGLang
            answers the update that brought it with the error.
    """
    original = model.load_weights

    def permute(name: str, weight: Tensor) -> Tensor:
        try:
            return permutation.permute(name, weight)
        except ValueError as error:
            if started():
                raise
            stop(error)

    @functools.wraps(original)
    def load_weights(weights: Iterable[tuple[Any, ...]], *args: Any, **kwargs: Any) -> Any:
        permuted = ((name, permute(name, weight), *more) for name, weight, *more in weights)
        return original(permuted, *args, **kwargs)

    model.load_weights = load_weights
    # for SGLang, which then neither saves weights nor sends them to other servers
    model._weight_export_error = "dasc: placement hybrid has the heads of weights in an order of its own"
