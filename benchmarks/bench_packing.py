"""Pack and unpack on the CPU at the geometry of whole models, against copying as many bytes with torch.

    pytest benchmarks/bench_packing.py

``share_of_copy_bandwidth`` in ``extra_info`` is the bytes moved a second (each byte read and each written) over those
of a ``clone``, which like pack and unpack writes to a new tensor, timed in the same rounds; median of the rounds.

A KDA unit is a column of its head's ``[V, K]`` state and 16 FP32 columns share a cache line: packing scattered columns
moves nearly every line of the heads that keep any. ``line_bytes`` counts those, and ``share_by_lines`` is the share of
copy bandwidth with them in place of the units' own bytes.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from torch import Tensor

from dasc import fast, reference
from dasc.geometry import DtypePolicy, StateGeometry
from dasc.layout import Layout, RaggedLayout
from dasc.models.synthetic import GEOMETRIES, example_gate, published_kimi_linear
from dasc.reference import select_units, static_horizons

THREADS, LINE_BYTES = 2, 64
MODELS = pytest.mark.parametrize(("model", "w_max"), [("kimi-linear", 16), ("qwen3-next", 64), ("kimi-k3", 128)])
A_S = {"kimi-linear": -0.3, "qwen3-next": -0.3, "kimi-k3": 0.8}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


@cache
def geometry_and_mask(model: str, w_max: int) -> tuple[StateGeometry, Tensor]:
    """Kimi-Linear's mask has the published counts; the others come from made-up parameters."""
    if model == "kimi-linear":
        geometry, gate = published_kimi_linear()
    else:
        geometry = GEOMETRIES[model]
        gate = example_gate(geometry)
    return geometry, select_units(static_horizons(gate, A_S[model]), w_max)


def build(model: str, w_max: int, int8: bool) -> tuple[Tensor, Tensor, RaggedLayout]:
    geometry, mask = geometry_and_mask(model, w_max)
    layout = RaggedLayout.from_mask(geometry, mask, DtypePolicy(int8=int8))
    L, *state = geometry.state_shape
    _, *conv = geometry.conv_shape
    gen = torch.Generator().manual_seed(0)
    return torch.randn(L, 1, *state, generator=gen), torch.randn(L, 1, *conv, generator=gen).bfloat16(), layout


def line_bytes(layout: Layout) -> int:
    """Bytes of the dense state's cache lines that hold anything retained."""
    geometry = layout.geometry
    if geometry.kind == "gdn":
        return layout.retained_units * geometry.unit_elements * layout.dtypes.temporal.itemsize
    columns = LINE_BYTES // layout.dtypes.temporal.itemsize
    lines = layout.mask.view(-1, geometry.head_k_dim // columns, columns).any(dim=-1).sum()
    return int(lines) * geometry.head_v_dim * LINE_BYTES


class Copying:
    """Clones of ``size`` bytes before each round, for the bandwidth that the rounds had."""

    def __init__(self, size: int) -> None:
        self.source = torch.ones(size // 4)
        self.seconds: list[float] = []

    def run(self) -> None:
        started = time.perf_counter()
        self.source.clone()
        self.seconds.append(time.perf_counter() - started)

    def share(self, moved_bytes: int, rounds: list[float]) -> float:
        rates = [2 * self.source.nbytes / seconds for seconds in self.seconds[-len(rounds) :]]
        return statistics.median(moved_bytes / own / rate for own, rate in zip(rounds, rates))


def run(benchmark, call: Callable[[], object], copied_bytes: int, moved_bytes: int, by_lines: int, **info: object):
    """Time ``call`` and fill ``extra_info``."""
    copying = Copying(copied_bytes)
    result = benchmark.pedantic(call, setup=copying.run, rounds=7, warmup_rounds=1)
    if benchmark.stats is not None:  # None when benchmarks are only tried out
        rounds = benchmark.stats.stats.data
        benchmark.extra_info |= info | {
            "threads": THREADS,
            "moved_bytes": moved_bytes,
            "gb_per_s": moved_bytes / min(rounds) / 1e9,
            "copy_gb_per_s": 2 * copying.source.nbytes / min(copying.seconds) / 1e9,
            "share_of_copy_bandwidth": copying.share(moved_bytes, rounds),
            "line_bytes": by_lines,
            "share_by_lines": copying.share(by_lines, rounds),
        }
    return result


def stored_bytes(layout: Layout) -> int:
    return layout.temporal_slot_bytes + layout.scale_slot_bytes


@pytest.mark.parametrize("int8", [False, True], ids=["exact", "int8"])
@MODELS
def test_pack(benchmark, model: str, w_max: int, int8: bool):
    state, conv, layout = build(model, w_max, int8)
    values = layout.retained_units * layout.geometry.unit_elements * state.itemsize
    both_ways = 2 * layout.conv_slot_bytes + stored_bytes(layout)
    packed = run(
        benchmark,
        lambda: fast.pack(state, conv, layout),
        copied_bytes=layout.slot_bytes,
        moved_bytes=values + both_ways,
        by_lines=line_bytes(layout) + both_ways,
        model=model,
        w_max=w_max,
        retained=layout.retained_units / layout.geometry.num_units,
        slot_bytes=layout.slot_bytes,
    )
    expected = reference.pack(state, conv, layout)
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(packed, expected))


@pytest.mark.parametrize("refreshed", [False, True], ids=["zero_fill", "refreshed"])
@pytest.mark.parametrize("int8", [False, True], ids=["exact", "int8"])
@MODELS
def test_unpack(benchmark, model: str, w_max: int, int8: bool, refreshed: bool):
    """Writes a whole dense state; with a refreshed base, also reads what it does not replace."""
    state, conv, layout = build(model, w_max, int8)
    packed = reference.pack(state, conv, layout)
    base = state + 1 if refreshed else None
    dense = layout.geometry.temporal_bytes(layout.dtypes)
    moved = stored_bytes(layout) + dense + 2 * layout.conv_slot_bytes
    omitted = dense - layout.retained_units * layout.geometry.unit_elements * state.itemsize
    restored = run(
        benchmark,
        lambda: fast.unpack(packed, layout, base),
        copied_bytes=dense,
        moved_bytes=moved + (omitted if refreshed else 0),
        by_lines=moved + (omitted if refreshed else 0),
        model=model,
        w_max=w_max,
        retained=layout.retained_units / layout.geometry.num_units,
        slot_bytes=layout.slot_bytes,
    )
    assert torch.equal(restored.temporal, reference.unpack(packed, layout, base).temporal)
    assert torch.equal(restored.conv, conv)
