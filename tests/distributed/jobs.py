"""What the ranks of a test do, each in a process of its own. A failed assertion is reported with its rank."""

import dataclasses
import os
import signal
import time
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from dasc.contract import DenseState, PackedState
from dasc.fast.distributed import ExchangeCounters, ExchangeError, StorageExchange, agree_on, outcome_agreement
from dasc.plan import SelectionPlan
from dasc.reference import pack_slots, unpack_slots
from tests.cache.fakes import Host
from tests.cache.test_ranks import CONFIG, play
from tests.distributed.cases import (
    Case,
    native_pool,
    own_layout,
    plan_of,
    poisoned_slots,
    same_bits,
    stored_oracle,
)

NATIVE_SLOTS, STORE_SLOTS = 4, 5
SOURCES, TARGETS = torch.tensor([3, 0, 1]), torch.tensor([2, 0, 3])
RESTORED = torch.tensor([1, 2, 0], dtype=torch.int32)
_kept = []  # groups that must not close before the process ends


def clone(state):
    """A copy of a pool with the same strides."""
    return type(state)(*(None if part is None else part.clone(memory_format=torch.preserve_format) for part in state))


def assert_same(state, expected) -> None:
    for name, part, right in zip(state._fields, state, expected):
        assert part is right is None or same_bits(part, right), f"{name} differs"


def round_trip(rank: int, world: int, case: Case, max_batch: int) -> tuple[ExchangeCounters, ExchangeCounters]:
    """Three checkpoints stored and loaded again, every byte of every pool compared; the counters after each."""
    plan = plan_of(case, world)
    exchange = StorageExchange(plan, max_batch=max_batch)
    natives = [native_pool(case, own_layout(plan, world, r), NATIVE_SLOTS, seed=r) for r in range(world)]
    native = natives[rank]
    store = poisoned_slots(case, exchange.layout, STORE_SLOTS)

    native_before, expected = clone(native), clone(store)
    exchange.store(native, SOURCES, store, TARGETS)
    slots = stored_oracle(plan, world, rank, natives, SOURCES)
    expected.temporal[TARGETS] = slots.temporal
    expected.conv[:, TARGETS] = slots.conv
    if expected.scales is not None:
        expected.scales[TARGETS] = slots.scales
    assert_same(store, expected)
    assert_same(native, native_before)

    after_store = dataclasses.replace(exchange.counters)

    own = own_layout(plan, world, rank)
    packed = own_slots(case, own, native)
    restored = native_pool(dataclasses.replace(case, broken=False), own, NATIVE_SLOTS, seed=99)
    expected_native, store_before = clone(restored), clone(store)
    exchange.load(store, TARGETS, restored, RESTORED, omitted=case.omitted)
    unpack_slots(packed, torch.arange(3), expected_native, RESTORED, own, omitted=case.omitted)
    assert_same(restored, expected_native)
    assert_same(store, store_before)
    return after_store, exchange.counters


def own_slots(case: Case, own, native: DenseState) -> PackedState:
    """The checkpoints as the rank would store them alone."""
    packed = poisoned_slots(case, own, 3)
    pack_slots(native, SOURCES, packed, torch.arange(3), own)
    return packed


def without_collectives(rank: int, world: int, case: Case) -> tuple[ExchangeCounters, ExchangeCounters]:
    """A round trip while any all-to-all raises."""
    with patch("torch.distributed.all_to_all_single", side_effect=AssertionError("an all-to-all was called")):
        return round_trip(rank, world, case, 2)


def store_nothing(rank: int, world: int, case: Case) -> ExchangeCounters:
    exchange = StorageExchange(plan_of(case, world), max_batch=2)
    native, store = pools(exchange, case)
    none = torch.empty(0, dtype=torch.int64)
    exchange.store(native, none, store, none)
    exchange.load(store, none, native, none)
    return exchange.counters


def pools(exchange: StorageExchange, case: Case) -> tuple[DenseState, PackedState]:
    return native_pool(case, exchange.layout, 1, 0), poisoned_slots(case, exchange.layout, 1)


def altered(plan: SelectionPlan, world: int, what: str) -> SelectionPlan:
    """The plan that one rank was given by mistake."""
    if what == "w_max":
        return dataclasses.replace(plan, w_max=64)
    if what == "int8":
        return dataclasses.replace(plan, dtypes=dataclasses.replace(plan.dtypes, quantized="int8"))
    if what == "weights":
        return dataclasses.replace(plan, fingerprint="sha256:" + "1" * 64)
    if what == "no placement":
        return dataclasses.replace(plan, placements={})
    if what == "mask":
        mask = plan.mask.clone()
        mask[3] = mask[3].roll(1)
        return dataclasses.replace(plan, mask=mask, windows=torch.where(mask, 0, 16), placements={})
    if what == "windows":
        return dataclasses.replace(plan, windows=torch.where(plan.mask, 0, 5))
    assert what == "hybrid"
    return plan_of(Case("gdn", mode="hybrid"), world)


def construct_at_odds(rank: int, world: int, what: str) -> None:
    """Every rank constructs an exchange, and rank 1 with something else than the others."""
    plan = plan_of(Case("gdn"), world)
    odd = rank == 1
    if what == "max_batch":
        StorageExchange(plan, max_batch=0 if odd else 2)
    else:
        StorageExchange(altered(plan, world, what) if odd else plan, max_batch=2)


def construct_without_placement(rank: int, world: int) -> None:
    StorageExchange(dataclasses.replace(plan_of(Case("gdn"), world), placements={}), max_batch=2)


def construct_without_batch(rank: int, world: int) -> None:
    StorageExchange(plan_of(Case("gdn"), world), max_batch=0)


def wrong_argument(rank: int, world: int, what: str) -> None:
    """Store with an argument that every rank must refuse before anything is sent."""
    case = Case("gdn")
    exchange = StorageExchange(plan_of(case, world), max_batch=2)
    native, store = pools(exchange, case)
    slot = torch.tensor([0])
    if what == "slot":
        exchange.store(native, slot, store, torch.tensor([1]))
    elif what == "width":
        narrow = PackedState(store.temporal[:, 1:], store.conv, None)
        exchange.store(native, slot, narrow, slot)
    elif what == "omitted":
        exchange.load(store, slot, native, slot, omitted="keep")
    else:
        exchange.store(DenseState(native.temporal.to("meta"), native.conv), slot, store, slot)


def late_rank(rank: int, world: int) -> float:
    """Rank 1 never comes to compare. Seconds until the others know."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    _kept.append(group)
    started = time.monotonic()
    if rank != 1:
        with pytest.raises(ExchangeError, match=f"comparing w_max failed on rank {rank} of {world}"):
            agree_on({"w_max": "16"}, group)
    return time.monotonic() - started


def all_outcomes(rank: int, world: int) -> list[bool]:
    """What ranks agree on when all say yes, when one says no, and when all do."""
    agree = outcome_agreement()
    return [agree(True), agree(rank != 1), agree(False)]


def cache_with_failing_packs(rank: int, world: int, asks: bool) -> tuple[list[str], int]:
    """A cache whose packs fail now and then on rank 1 alone: its history, and its failed packs."""
    options = {"agree": outcome_agreement()} if asks else {}
    host = Host(CONFIG, **options)

    def fail_here(step: int) -> None:
        host.mover.packs_fail = rank == 1 and step % 4 == 0

    return play(host, 7, between=fail_here), host.cache.counters.failed_packs


def store_beside_a_killed_rank(rank: int, world: int) -> None:
    case = Case("gdn")
    exchange = StorageExchange(plan_of(case, world), max_batch=1)
    native, store = pools(exchange, case)
    slot = torch.tensor([0])
    exchange.store(native, slot, store, slot)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    exchange.store(native, slot, store, slot)
