"""The plugin's compressed pool inside SGLang's own state pools, on one GPU: correctness first, then device time.

    pip install 'dasc[sglang]'
    python -m benchmarks.gpu.sglang_pools --out pools.json

SGLang's pool of running states is built with the geometry of Kimi-Linear and of Qwen3-Next, whole and as one of eight
ranks. Checkpoints are stored from it and loaded back by the plugin's pool and by SGLang's INT8 pool, with the calls
that the server makes.

1. The gate. Ours must give, bit for bit, what the reference makes of the states, and touch no other slot. With every
   unit kept as INT8 it must give SGLang's own INT8 values, computed on the CPU; SGLang's pool on the GPU must be within
   one step of them (it divides by 127 as a product there). A red gate ends the run with status 1 and without times.
2. The ceiling: copy bandwidth of this GPU in this run.
3. Times: as in ``run.py``, median and 20/80 quantiles with a cold L2, by CUDA events, so gaps between the launches of a
   call count. Bytes are those that must be read and written once; the share is of copy bandwidth. Beside both pools
   stands SGLang's copy of a dense state, which is what a hit costs without compression.

``--check`` runs all of it once at tiny sizes, on the CPU where there is no GPU, and times nothing worth reading.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from sglang.srt.configs.mamba_utils import (
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2CacheParams,
    Mamba2StateDType,
    Mamba2StateShape,
)
from sglang.srt.mem_cache.mamba_checkpoint_pool import Int8CheckpointStore, MambaCheckpointPool
from sglang.srt.mem_cache.memory_pool import MambaPool

from benchmarks.gpu.run import DEVICE, GEOMETRIES, QUANTIZED, Report, Timer, ceilings, environment, finish, row_of
from dasc import reference
from dasc.cache.counters import Counters
from dasc.contract import DenseState
from dasc.geometry import DtypePolicy, Quantization, StateGeometry
from dasc.layout import RaggedLayout
from dasc.sglang.pool import CompressedPool, native_state

KEPT = 0.36  # of the units: the published share of Kimi-Linear at W_max = 16
SMALL = {
    "small kda": StateGeometry("small", "kda", 3, (0, 1, 2), 4, 4, 16, 16),
    "small gdn": StateGeometry("small", "gdn", 3, (0, 1, 2), 4, 2, 8, 16),
}
MODELS = {name: GEOMETRIES[name] for name in ("kimi_linear", "qwen3_next")}


# -- pools ------------------------------------------------------------------------------------------------------------


def cache_params(geometry: StateGeometry) -> Mamba2CacheParams | KimiLinearCacheParams:
    """As SGLang's model configurations make them, FP32 states and BF16 convolution rows."""
    layers, dtype = list(geometry.recurrent_layers), Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)
    if geometry.kind == "kda":
        shape = KimiLinearStateShape.create(
            tp_world_size=1, num_heads=geometry.num_value_heads, head_dim=geometry.head_v_dim
        )
        return KimiLinearCacheParams(shape=shape, layers=layers, dtype=dtype)
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=geometry.num_value_heads * geometry.head_v_dim,
        n_groups=geometry.num_key_heads,
        num_heads=geometry.num_value_heads,
        head_dim=geometry.head_v_dim,
        state_size=geometry.head_k_dim,
        conv_kernel=geometry.conv_width,
    )
    return Mamba2CacheParams(shape=shape, layers=layers, dtype=dtype)


def running_states(geometry: StateGeometry, slots: int, seed: int) -> MambaPool:
    """SGLang's pool of running states with ``slots`` usable slots, every value drawn."""
    pool = MambaPool(
        size=slots,
        spec_state_size=0,
        cache_params=cache_params(geometry),
        mamba_layer_ids=list(geometry.recurrent_layers),
        device=str(DEVICE),
        enable_memory_saver=False,
    )
    gen = torch.Generator(DEVICE).manual_seed(seed)
    for part in (pool.mamba_cache.temporal, *pool.mamba_cache.conv):
        part.copy_(torch.randn(part.shape, generator=gen, device=DEVICE))
    return pool


def compressed_pool(
    geometry: StateGeometry, slots: int, *, kept: float, quantized: Quantization | None
) -> CompressedPool:
    """The plugin's pool for a plan that keeps a share of the units."""
    gen = torch.Generator().manual_seed(0)
    mask = torch.rand(geometry.num_layers, geometry.units_per_layer, generator=gen) < kept
    layout = RaggedLayout.from_mask(geometry, mask, DtypePolicy(quantized=quantized))
    return CompressedPool(layout, slots, DEVICE, Counters())


def sglang_int8_pool(geometry: StateGeometry, slots: int) -> MambaCheckpointPool:
    """SGLang's INT8 pool, as its ``maybe_init_int8_mamba_checkpoint_pool`` makes it."""
    params = cache_params(geometry)
    heads, d_v, d_k = params.shape.temporal
    return MambaCheckpointPool(
        num_layers=geometry.num_layers,
        num_slots=slots,
        num_heads=heads,
        head_v_dim=d_v,
        head_k_dim=d_k,
        conv_shapes=list(params.shape.conv),
        conv_dtype=params.dtype.conv,
        device=str(DEVICE),
        temporal_dtype=params.dtype.temporal,
    )


# -- the gate ---------------------------------------------------------------------------------------------------------

STORED, LOADED, SLOTS, SIZE = [2, 4], [3, 1], [3, 1], 4


def round_trip(pool: CompressedPool | MambaCheckpointPool, source: MambaPool, target: MambaPool) -> DenseState:
    """``target`` on the CPU after two checkpoints of ``source`` were stored and loaded into it."""
    stored, loaded, slots = (torch.tensor(numbers, device=DEVICE) for numbers in (STORED, LOADED, SLOTS))
    pool.store_from_active(source, stored, slots)
    pool.load_to_active(target, slots, loaded)
    return DenseState(*(part.cpu() for part in native_state(target)))


def written(before: MambaPool, loaded: DenseState) -> DenseState:
    """The target that a round trip must leave: ``before`` but for the loaded slots."""
    expected = DenseState(*(part.to("cpu", copy=True) for part in native_state(before)))
    for part, new in zip(expected, loaded):
        part[:, LOADED] = new
    return expected


def gate(report: Report, models: dict[str, StateGeometry]) -> None:
    for name, geometry in models.items():
        source = running_states(geometry, SIZE, seed=1)
        states = DenseState(*(part[:, STORED].cpu() for part in native_state(source)))
        for quantized in QUANTIZED:
            pool = compressed_pool(geometry, SIZE, kept=KEPT, quantized=quantized)
            expected = reference.unpack(reference.pack(*states, pool.layout), pool.layout)
            same(report, f"{name} {quantized}", pool, source, geometry, expected)

        quantised = Int8CheckpointStore.quantize(states.temporal)
        expected = states._replace(temporal=Int8CheckpointStore.dequantize(*quantised, torch.float32))
        pool = compressed_pool(geometry, SIZE, kept=1.0, quantized="int8")
        same(report, f"{name} all INT8", pool, source, geometry, expected)

        found = round_trip(sglang_int8_pool(geometry, SIZE), source, running_states(geometry, SIZE, seed=2))
        step = quantised[1] * (1 + 1e-5)
        near = bool(((found.temporal[:, LOADED] - expected.temporal).abs() <= step).all())
        exact = torch.equal(found.conv[:, LOADED], expected.conv)
        report.gate.append({"name": f"{name} SGLang's INT8", "ok": near and exact})


def same(
    report: Report, name: str, pool: CompressedPool, source: MambaPool, geometry: StateGeometry, loaded: DenseState
) -> None:
    """One row of the gate: a round trip through ``pool`` gives ``loaded``, to the bit, and nothing else changes."""
    target = running_states(geometry, SIZE, seed=2)
    expected = written(target, loaded)
    found = round_trip(pool, source, target)
    ok = all(torch.equal(a, b) for a, b in zip(found, expected))
    report.gate.append({"name": f"store/load {name}", "ok": ok})


# -- times ------------------------------------------------------------------------------------------------------------


def time_pools(report: Report, timer: Timer, models: dict[str, StateGeometry]) -> None:
    for name, whole in models.items():
        for ranks in (1, 2) if timer.small else (1, 8):
            for count in (1,) if timer.small else (1, 8):
                time_one(report, timer, name, whole.shard(ranks), ranks, count)


def time_one(report: Report, timer: Timer, name: str, geometry: StateGeometry, ranks: int, count: int) -> None:
    """Stores and loads of ``count`` checkpoints of one rank, by each pool in turn."""
    states = running_states(geometry, 2 * count, seed=0)
    slots = torch.arange(1, count + 1, device=DEVICE)
    active = slots + count
    dense = geometry.dense_bytes()
    facts = {"model": name, "ranks": ranks, "N": count}

    def add(what: str, pool: str, call: Callable[[], object], moved: int) -> dict[str, object]:
        row = row_of(what, geometry.kind, timer(call, budget_s=0.3), pool=pool, bytes=count * moved, **facts)
        row["share_of_copy_bandwidth"] = count * moved / float(row["s"]) / report.ceilings["copy_bytes_per_s"]
        report.times.append(row)
        return row

    add("load", "dense", lambda: states.copy_from(slots, active), 2 * dense)
    theirs = sglang_int8_pool(geometry, count)
    their_bytes = theirs.mem_usage_bytes() // (count + 1)
    peers = {
        "store": add(
            "store", "sglang int8", lambda: theirs.store_from_active(states, slots, slots), dense + their_bytes
        ),
        "load": add("load", "sglang int8", lambda: theirs.load_to_active(states, slots, active), their_bytes + dense),
    }
    ours: list[tuple[str, Quantization | None, float]] = [
        ("dasc", None, KEPT),
        ("dasc int8", "int8", KEPT),
        ("dasc int4", "int4", KEPT),
        ("dasc all int8", "int8", 1.0),
    ]
    for label, quantized, kept in ours:
        pool = compressed_pool(geometry, count, kept=kept, quantized=quantized)
        layout = pool.layout
        read = layout.retained_units * geometry.unit_elements * 4 + layout.conv_slot_bytes
        calls: dict[str, tuple[Callable[[], object], int]] = {
            "store": (lambda: pool.store_from_active(states, slots, slots), read + layout.slot_bytes),  # noqa: B023
            "load": (lambda: pool.load_to_active(states, slots, active), layout.slot_bytes + dense),  # noqa: B023
        }
        for what, (call, moved) in calls.items():
            row = add(what, label, call, moved)
            row["times_faster_than_sglang_int8"] = float(peers[what]["s"]) / float(row["s"])


def show(report: Report) -> None:
    for row in report.times:
        case = f"{row['model']} ranks={row['ranks']} N={row['N']}"
        ratio = row.get("times_faster_than_sglang_int8")
        print(
            f"{row['what']:6} {row['pool']:14} {case:30} {float(row['s']) * 1e6:10.1f} us"
            f"  {row['share_of_copy_bandwidth']:.2f} of copy bandwidth"
            + ("" if ratio is None else f"  {ratio:.2f} times as fast as SGLang's INT8 pool")
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write everything measured to this JSON file")
    parser.add_argument("--check", action="store_true", help="tiny sizes, to see that the script works")
    arguments = parser.parse_args()
    if DEVICE.type == "cpu" and not arguments.check:
        print("sglang_pools: no GPU here; --check runs tiny sizes on the CPU", file=sys.stderr)
        return 2
    models = SMALL if arguments.check else MODELS
    report = Report(environment() | {"sglang": importlib.metadata.version("sglang")})
    started = time.perf_counter()
    gate(report, models)
    red = [row["name"] for row in report.gate if not row["ok"]]
    print(f"gate: {len(report.gate) - len(red)} of {len(report.gate)} cases equal")
    if red:
        print(f"  not: {', '.join(map(str, red))}")
    else:
        timer = Timer(arguments.check)
        report.ceilings = {"copy_bytes_per_s": ceilings(timer)["copy_bytes_per_s"]}
        time_pools(report, timer, models)
        show(report)
    return finish(report, arguments.out, started)


if __name__ == "__main__":
    sys.exit(main())
