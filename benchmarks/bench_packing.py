"""Pack and unpack on the CPU at the geometry of whole models, against copying as many bytes with torch.

    pytest benchmarks/bench_packing.py

``share_of_copy_bandwidth`` in ``extra_info`` is the bytes moved a second (each byte read and each written) over those
of a copy timed in the same rounds: of a ``clone`` for ``pack`` and ``unpack``, which write to new tensors too, of
``copy_`` for slots, which write to what is there. It is the median of the rounds.

A KDA unit is a column of its head's ``[V, K]`` state and 16 FP32 columns share a cache line: packing scattered columns
moves nearly every line of the heads that keep any. ``line_bytes`` counts those, and ``share_by_lines`` is the share of
copy bandwidth with them in place of the units' own bytes.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from dasc import fast, reference
from dasc.contract import DenseState, PackedState
from dasc.geometry import QUANTIZATIONS, DtypePolicy, Quantization
from dasc.layout import Layout, RaggedLayout
from tests.masks import model_mask

pytestmark = pytest.mark.usefixtures("threads")

LINE_BYTES = 64


class Case(NamedTuple):
    model: str
    w_max: int
    quantized: Quantization | None = None

    def __str__(self) -> str:
        return f"{self.model}-{self.w_max}{f'-{self.quantized}' if self.quantized else ''}"

    def build(self, smoke: bool) -> tuple[Tensor, Tensor, RaggedLayout]:
        """One state, its convolution rows and the layout; of two layers only in a smoke run."""
        geometry, mask = model_mask(self.model, self.w_max)
        if smoke:
            geometry, mask = dataclasses.replace(geometry, recurrent_layers=geometry.recurrent_layers[:2]), mask[:2]
        layout = RaggedLayout.from_mask(geometry, mask, DtypePolicy(quantized=self.quantized))
        L, *state = geometry.state_shape
        _, *conv = geometry.conv_shape
        gen = torch.Generator().manual_seed(0)
        return torch.randn(L, 1, *state, generator=gen), torch.randn(L, 1, *conv, generator=gen).bfloat16(), layout


BASIC = [Case("kimi-linear", 16), Case("qwen3-next", 64)]
EXACT = [
    *BASIC,
    *(
        pytest.param(Case(model, w_max), marks=pytest.mark.usual)
        for model, w_max in (("kimi-linear", 64), ("kimi-linear", 128), ("qwen3-next", 16), ("qwen3-next", 128))
    ),
    pytest.param(Case("kimi-k3", 128), marks=pytest.mark.long),
]
QUANTIZED = [
    Case(model, w_max, quantized)
    for quantized in QUANTIZATIONS
    for model, w_max in (("kimi-linear", 16), ("qwen3-next", 64))
]


class Sizes:
    """Bytes that packing and unpacking one checkpoint move."""

    def __init__(self, layout: Layout) -> None:
        geometry, itemsize = layout.geometry, layout.dtypes.temporal.itemsize
        self.dense = geometry.temporal_bytes(layout.dtypes)
        self.retained = layout.retained_units * geometry.unit_elements * itemsize
        self.stored = layout.temporal_slot_bytes + layout.scale_slot_bytes
        self.conv = 2 * layout.conv_slot_bytes
        self.lines = self.retained  # of the dense state's cache lines that hold anything retained
        if geometry.kind == "kda":
            columns = LINE_BYTES // itemsize
            touched = layout.mask.view(-1, geometry.head_k_dim // columns, columns).any(dim=-1).sum()
            self.lines = int(touched) * geometry.head_v_dim * LINE_BYTES

    @property
    def packed(self) -> int:
        return self.retained + self.stored + self.conv


class Copying:
    """A copy of ``size`` bytes before each round, for the bandwidth that the rounds had."""

    def __init__(self, size: int, in_place: bool) -> None:
        self.source = torch.ones(size // 4)
        self.target = torch.empty_like(self.source) if in_place else None
        self.seconds: list[float] = []

    def run(self) -> None:
        started = time.perf_counter()
        if self.target is None:
            self.source.clone()
        else:
            self.target.copy_(self.source)
        self.seconds.append(time.perf_counter() - started)

    def share(self, moved_bytes: int, rounds: list[float]) -> float:
        rates = [2 * self.source.nbytes / seconds for seconds in self.seconds[-len(rounds) :]]
        return statistics.median(moved_bytes / own / rate for own, rate in zip(rounds, rates))


def run(
    benchmark, call: Callable[[], object], layout: Layout, *, copied: int, moved: int, by_lines: int, in_place: bool
) -> object:
    """Time ``call`` and fill ``extra_info``."""
    copying = Copying(copied, in_place)
    result = benchmark.pedantic(call, setup=copying.run, rounds=7, warmup_rounds=1)
    if benchmark.stats is not None:  # None when benchmarks are only tried out
        rounds = benchmark.stats.stats.data
        benchmark.extra_info |= {
            "retained": layout.retained_units / layout.geometry.num_units,
            "slot_bytes": layout.slot_bytes,
            "threads": torch.get_num_threads(),
            "moved_bytes": moved,
            "gb_per_s": moved / min(rounds) / 1e9,
            "copy_gb_per_s": 2 * copying.source.nbytes / min(copying.seconds) / 1e9,
            "share_of_copy_bandwidth": copying.share(moved, rounds),
            "line_bytes": by_lines,
            "share_by_lines": copying.share(by_lines, rounds),
        }
    return result


@pytest.mark.parametrize("case", [*EXACT, *QUANTIZED], ids=str)
def test_pack(benchmark, smoke: bool, case: Case):
    state, conv, layout = case.build(smoke)
    size = Sizes(layout)
    packed = run(
        benchmark,
        lambda: fast.pack(state, conv, layout),
        layout,
        copied=layout.slot_bytes,
        moved=size.packed,
        by_lines=size.packed - size.retained + size.lines,
        in_place=False,
    )
    expected = reference.pack(state, conv, layout)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(packed, expected))


@pytest.mark.parametrize("refreshed", [False, True], ids=["zero_fill", "refreshed"])
@pytest.mark.parametrize("case", [*EXACT, *QUANTIZED], ids=str)
def test_unpack(benchmark, smoke: bool, case: Case, refreshed: bool):
    """Writes a whole dense state; with a refreshed base, also reads what it does not replace."""
    state, conv, layout = case.build(smoke)
    packed, size = reference.pack(state, conv, layout), Sizes(layout)
    base = state + 1 if refreshed else None
    moved = size.stored + size.dense + size.conv + (size.dense - size.retained if refreshed else 0)
    restored = run(
        benchmark,
        lambda: fast.unpack(packed, layout, base),
        layout,
        copied=size.dense,
        moved=moved,
        by_lines=moved,
        in_place=False,
    )
    assert torch.equal(restored.temporal, reference.unpack(packed, layout, base).temporal)
    assert torch.equal(restored.conv, conv)


def pools(case: Case, smoke: bool) -> tuple[DenseState, PackedState, RaggedLayout]:
    """A native pool of two slots, the second of them zero, and a store of one."""
    state, conv, layout = case.build(smoke)
    native = DenseState(*(torch.cat([part, torch.zeros_like(part)], dim=1) for part in (state, conv)))
    return native, reference.pack(state, conv, layout), layout


FIRST, SECOND = torch.tensor([0]), torch.tensor([1])


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_pack_slots(benchmark, smoke: bool, case: Case):
    native, expected, layout = pools(case, smoke)
    store = PackedState(torch.zeros_like(expected.temporal), torch.zeros_like(expected.conv), None)
    size = Sizes(layout)
    run(
        benchmark,
        lambda: fast.pack_slots(native, FIRST, store, FIRST, layout),
        layout,
        copied=layout.slot_bytes,
        moved=size.packed,
        by_lines=size.packed - size.retained + size.lines,
        in_place=True,
    )
    assert torch.equal(store.temporal, expected.temporal)
    assert torch.equal(store.conv, expected.conv)


@pytest.mark.parametrize("omitted", ["zero", "leave"])
@pytest.mark.parametrize("case", EXACT, ids=str)
def test_unpack_slots(benchmark, smoke: bool, case: Case, omitted: str):
    """``leave`` writes the retained units alone, for KDA within nearly all lines."""
    native, store, layout = pools(case, smoke)
    size = Sizes(layout)
    moved = size.stored + size.conv + (size.dense if omitted == "zero" else size.retained)
    run(
        benchmark,
        lambda: fast.unpack_slots(store, FIRST, native, SECOND, layout, omitted=omitted),
        layout,
        copied=size.dense if omitted == "zero" else size.retained,
        moved=moved,
        by_lines=moved if omitted == "zero" else moved - size.retained + size.lines,
        in_place=True,
    )
    assert torch.equal(native.temporal[:, 1:], reference.unpack(store, layout).temporal)
