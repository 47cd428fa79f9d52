"""Storage balancing over two ranks on gloo, against the same ranks packing only for themselves.

    pytest benchmarks/bench_storage.py

At Kimi-Linear's geometry: with its published counts 92 of 29,389 retained units move; ``one_sided`` is the worst case,
where one rank retains everything and sends half of it.

``ratio_to_plain`` is the time of a store (load) of the exchange over that of ``pack_slots`` (``unpack_slots``) of each
rank's own units, on the slower rank, in the same rounds; median of the rounds. Two processes of one thread each.
"""

import statistics
import time
from typing import NamedTuple

import pytest
import torch

from dasc import fast
from dasc.contract import DenseState, PackedState
from dasc.fast.distributed import StorageExchange, row_bytes
from dasc.geometry import DtypePolicy, Quantization
from dasc.layout import RaggedLayout
from dasc.plan import SelectionPlan
from dasc.reference import place
from tests.distributed.ranks import Ranks
from tests.masks import KIMI_LINEAR, kimi_linear_mask

WORLD, ROUNDS = 2, 7


class Setting(NamedTuple):
    one_sided: bool
    quantized: Quantization | None
    checkpoints: int


_built: dict[Setting, "Rank"] = {}  # of this process


def plan_of(setting: Setting) -> SelectionPlan:
    mask = kimi_linear_mask()
    if setting.one_sided:
        mask[:, mask.shape[1] // WORLD :] = False
    return SelectionPlan(
        family=KIMI_LINEAR.family,
        geometry=KIMI_LINEAR,
        epsilon=1e-3,
        gate_input=-0.3,
        w_max=16,
        mask=mask,
        windows=torch.where(mask, 0, 16),
        fingerprint="sha256:" + "0" * 64,
        placements={WORLD: place(KIMI_LINEAR, mask, WORLD, "storage")},
        dtypes=DtypePolicy(quantized=setting.quantized),
    )


def slot_pool(layout: RaggedLayout, slots: int) -> PackedState:
    L, channels, rows = layout.geometry.conv_shape
    return PackedState(
        torch.zeros(slots, *layout.slot_shape, dtype=layout.dtypes.stored_temporal),
        torch.zeros(L, slots, channels, rows, dtype=layout.dtypes.conv),
        torch.zeros(slots, layout.slot_units) if layout.dtypes.quantized else None,
    )


class Rank:
    """One rank's pools, filled once, in its process."""

    def __init__(self, rank: int, setting: Setting) -> None:
        batch = setting.checkpoints
        self.exchange = StorageExchange(plan_of(setting), max_batch=batch)
        layout = self.exchange.layout
        self.own = RaggedLayout.from_mask(layout.geometry, layout.mask, layout.dtypes)
        gen = torch.Generator().manual_seed(rank)
        L, *state = layout.geometry.state_shape
        _, *conv = layout.geometry.conv_shape
        self.native = DenseState(
            torch.randn(L, batch, *state, generator=gen), torch.randn(L, batch, *conv, generator=gen).bfloat16()
        )
        self.restored = {name: DenseState(*map(torch.zeros_like, self.native)) for name in ("plain", "exchanged")}
        self.slots = {"plain": slot_pool(self.own, batch), "exchanged": slot_pool(layout, batch)}
        self.at = torch.arange(batch)

    def plain_store(self) -> None:
        fast.pack_slots(self.native, self.at, self.slots["plain"], self.at, self.own)

    def plain_load(self) -> None:
        fast.unpack_slots(self.slots["plain"], self.at, self.restored["plain"], self.at, self.own)

    def store(self) -> None:
        self.exchange.store(self.native, self.at, self.slots["exchanged"], self.at)

    def load(self) -> None:
        self.exchange.load(self.slots["exchanged"], self.at, self.restored["exchanged"], self.at)


def timed(rank: int, world: int, setting: Setting, operation: str) -> float:
    """Seconds of an operation, begun on all ranks at once."""
    if setting not in _built:
        _built.clear()
        _built[setting] = Rank(rank, setting)
    call = getattr(_built[setting], operation)
    torch.distributed.barrier()
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def loads_as_alone(rank: int, world: int, setting: Setting) -> bool:
    """Whether a load after a store restores what the rank alone would have."""
    own = _built[setting]
    for operation in (own.plain_store, own.plain_load, own.store, own.load):
        operation()
    return all(torch.equal(a, b) for a, b in zip(own.restored["plain"], own.restored["exchanged"]))


@pytest.fixture(scope="module")
def ranks():
    ranks = Ranks(WORLD)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("checkpoints", [1, pytest.param(4, marks=pytest.mark.usual)])
@pytest.mark.parametrize("quantized", [None, "int8"], ids=["exact", "int8"])
@pytest.mark.parametrize(
    "one_sided", [False, pytest.param(True, marks=pytest.mark.usual)], ids=["published", "one_sided"]
)
@pytest.mark.parametrize("operation", ["store", "load"])
def test_exchange(
    benchmark, ranks: Ranks, operation: str, one_sided: bool, quantized: Quantization | None, checkpoints: int
):
    setting = Setting(one_sided, quantized, checkpoints)
    plain: list[float] = []
    exchanged: list[float] = []
    benchmark.pedantic(
        lambda: exchanged.append(max(ranks.run(timed, setting, operation))),
        setup=lambda: plain.append(max(ranks.run(timed, setting, f"plain_{operation}"))),
        rounds=ROUNDS,
        warmup_rounds=1,
    )
    plan = plan_of(setting)
    moved = plan.placements[WORLD].moved_units
    benchmark.extra_info |= {
        "checkpoints": checkpoints,
        "moved_units": moved,
        "moved_bytes": checkpoints * moved * row_bytes(plan.layouts(WORLD)[0]),
        "plain_s": statistics.median(plain[-ROUNDS:]),
        "exchange_s": statistics.median(exchanged[-ROUNDS:]),
        "ratio_to_plain": statistics.median(own / alone for own, alone in zip(exchanged[-ROUNDS:], plain[-ROUNDS:])),
    }
    assert ranks.run(loads_as_alone, setting) == [True, True]
