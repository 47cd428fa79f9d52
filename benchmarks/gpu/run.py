"""All kernels on one Hopper GPU: correctness first, then device time. One command, under five minutes.

    pip install 'dasc[triton]' fla-core==0.6.0
    python benchmarks/gpu/run.py --out gpu.json

1. The gate: every kernel against FP64 on the device, within twice the error of the same computation in plain PyTorch in
   the kernels' precision; packing bit for bit. A red gate ends the run with exit status 1 and no speed is printed.
2. The ceilings: copy bandwidth and the BF16 matrix rate, measured on this GPU in this run.
3. Times: median and 20/80 quantiles of runs with a cold L2 (a buffer larger than it is overwritten before each), by
   CUDA events. Each as a share of the ceiling that bounds it, and as a ratio to flash-linear-attention where installed.

``--check`` runs the gate and every timing once at tiny sizes, to see that the script works; on a machine without a GPU
this needs ``TRITON_INTERPRET=1`` and times nothing worth reading.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from dasc import fast, reference
from dasc.contract import DenseState, PackedState, RefreshMerge, zero_slots
from dasc.geometry import QUANTIZATIONS, DtypePolicy, Quantization, StateGeometry
from dasc.layout import Layout, PaddedLayout, RaggedLayout

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FLUSH_BYTES = 512 * 2**20  # ten times the L2 of an H200
D = 128
QUANTIZED: tuple[Quantization | None, ...] = (None, *QUANTIZATIONS)


@dataclass
class Report:
    """Everything measured, as it goes to the JSON file."""

    environment: dict[str, object]
    gate: list[dict[str, object]] = field(default_factory=list)
    ceilings: dict[str, float] = field(default_factory=dict)
    times: list[dict[str, object]] = field(default_factory=list)


# -- inputs -----------------------------------------------------------------------------------------------------------


def delta_rule_inputs(
    kind: str, N: int, T: int, H: int, dim: int, dtype: torch.dtype, seed: int = 0
) -> dict[str, Tensor]:
    """``N`` packed sequences of ``T`` tokens, ``K = V = dim``, gates as trained models have them, on the device."""
    gen = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, device=DEVICE)

    tokens = N * T
    rate = torch.exp(normal(H, dim) if kind == "kda" else normal(H)) * 0.05
    g = -rate * torch.nn.functional.softplus(normal(1, tokens, *rate.shape))
    return {
        "q": torch.nn.functional.normalize(normal(1, tokens, H, dim), dim=-1).to(dtype),
        "k": torch.nn.functional.normalize(normal(1, tokens, H, dim), dim=-1).to(dtype),
        "v": normal(1, tokens, H, dim).to(dtype),
        "g": g,
        "beta": torch.rand(1, tokens, H, generator=gen, device=DEVICE).to(dtype),
    }


GEOMETRIES = {
    # value heads, key heads and layers as published, the whole model on one rank
    "kimi_linear": StateGeometry("kimi_linear", "kda", 27, tuple(range(20)), 32, 32, D, D),
    "qwen3_next": StateGeometry("qwen3_next", "gdn", 48, tuple(range(36)), 32, 16, D, D),
    "kimi_k3": StateGeometry("kimi_k3", "kda", 93, tuple(range(69)), 96, 96, D, D),
}


def packing_pools(
    geometry: StateGeometry, kept: float, layout_kind: str, dtypes: DtypePolicy, slots: int, seed: int = 0
) -> tuple[DenseState, PackedState, Layout]:
    """Pools of ``slots`` slots, and a layout that retains ``kept`` of the units."""
    mask = torch.rand(geometry.num_layers, geometry.units_per_layer, generator=torch.Generator().manual_seed(seed)).lt(
        kept
    )
    layout: Layout = (PaddedLayout if layout_kind == "padded" else RaggedLayout).from_mask(geometry, mask, dtypes)
    gen = torch.Generator(DEVICE).manual_seed(seed)
    L, *state = geometry.state_shape
    _, channels, rows = geometry.conv_shape
    native = DenseState(
        torch.randn(L, slots, *state, generator=gen, device=DEVICE).to(dtypes.temporal),
        torch.randn(L, slots, channels, rows, generator=gen, device=DEVICE).to(dtypes.conv),
    )
    return native, zero_slots(layout, slots, DEVICE), layout


# -- the gate ---------------------------------------------------------------------------------------------------------


def relative_rms(got: Tensor, exact: Tensor, dims: tuple[int, ...]) -> Tensor:
    got, exact = got.double(), exact.double()
    return (got - exact).square().mean(dims).sqrt() / (exact.square().mean(dims).sqrt() + 1e-30)


def gate_recurrences(report: Report, small: bool) -> None:
    T, dim = (20, 16) if small else (700, D)
    for kind in ("gdn", "kda"):
        for dtype in (torch.float32,) if small else (torch.float32, torch.bfloat16, torch.float16):
            for N, length, replay in ((2, T, 0), (2, T, 7), (5, 1, 0)):
                x = delta_rule_inputs(kind, N, length, 2 if small else 4, dim, dtype, seed=N)
                H = x["q"].shape[2]
                state = torch.randn(N + 2, H, dim, dim, device=DEVICE)
                indices = torch.arange(1, N + 1, device=DEVICE)
                bounds = torch.arange(N + 1, device=DEVICE) * length
                if length == 1:
                    extra, names = {}, (f"decode_{kind}",)
                    x = {name: t.transpose(0, 1) for name, t in x.items()}
                else:
                    extra, names = {"cu_seqlens": bounds}, (f"prefill_{kind}",)
                    if replay:
                        keep = torch.rand((H, dim) if kind == "kda" else (H,), device=DEVICE) < 0.5
                        extra["refresh"] = RefreshMerge(keep, torch.full((N,), replay, device=DEVICE))
                for name in names:
                    runs = {}
                    for label, module, compute in (
                        ("exact", reference, torch.float64),
                        ("plain", reference, dtype),
                        ("ours", fast, dtype),
                    ):
                        pool = state.double() if compute == torch.float64 else state.clone()
                        inputs = {key: t.to(compute) if compute == torch.float64 else t for key, t in x.items()}
                        more = {"impl": "triton"} if module is fast else {}
                        o = getattr(module, name)(**inputs, pool=pool, state_indices=indices, **extra, **more)
                        runs[label] = (o, pool)
                    judge(report, name, dtype, N, length, replay, runs)


def judge(
    report: Report,
    name: str,
    dtype: torch.dtype,
    N: int,
    length: int,
    replay: int,
    runs: dict[str, tuple[Tensor, Tensor]],
) -> None:
    """Errors of outputs and states, worst (sequence, head); the plain run is rounded as the kernels' inputs are."""
    row: dict[str, object] = {"name": name, "dtype": str(dtype), "N": N, "T": length, "replay": replay, "ok": True}
    for part, dims in ((0, (1, 3)), (1, (2, 3))):
        o = [runs[label][part] for label in ("exact", "plain", "ours")]
        o = [t[1 : N + 1] if part else t.reshape(N, length, *t.shape[2:]) for t in o]
        plain, ours = relative_rms(o[1], o[0], dims), relative_rms(o[2], o[0], dims)
        # a low-precision kernel rounds the operands of its products; one rounding of the output is its floor
        budget = 2 * plain + 4 * torch.finfo(dtype).eps * (1 if dtype == torch.float32 else 2)
        worst = float((ours / budget).max())
        row |= {
            ("o", "state")[part]: float(ours.max()),
            ("o_plain", "state_plain")[part]: float(plain.max()),
            "ok": bool(row["ok"]) and bool(torch.isfinite(o[2]).all()) and worst <= 1,
        }
    outside = [runs["ours"][1][i] for i in (0, N + 1)]
    same = all(torch.equal(now, runs["plain"][1][i].to(now.dtype)) for i, now in zip((0, N + 1), outside))
    row["ok"] = bool(row["ok"]) and same
    report.gate.append(row)


def gate_packing(report: Report, small: bool) -> None:
    dim = 16 if small else D
    for kind in ("gdn", "kda"):
        geometry = StateGeometry("gate", kind, 3, (0, 1, 2), 4, 4 if kind == "kda" else 2, dim, dim)
        for layout_kind in ("ragged", "padded"):
            for quantized in QUANTIZED:
                dtypes = DtypePolicy(quantized=quantized)
                native, store, layout = packing_pools(geometry, 0.4, layout_kind, dtypes, 4)
                native_slots = torch.tensor([2, 0], device=DEVICE)
                store_slots = torch.tensor([1, 3], device=DEVICE)
                # the reference on the CPU, where a division by QMAX is one
                theirs = run_packing(reference, native, store, layout, native_slots, store_slots, torch.device("cpu"))
                mine = run_packing(fast, native, store, layout, native_slots, store_slots, DEVICE)
                ok = all(a is b or torch.equal(a.cpu(), b) for a, b in zip(mine, theirs))
                report.gate.append({"name": f"pack/unpack {kind} {layout_kind} {quantized}", "ok": ok})


def run_packing(
    module: ModuleType,
    native: DenseState,
    store: PackedState,
    layout: Layout,
    native_slots: Tensor,
    store_slots: Tensor,
    device: torch.device,
) -> tuple[Tensor | None, ...]:
    """Both pools, copied to ``device``, after a store and both kinds of load."""
    more = {"impl": "triton"} if module is fast else {}
    dense = DenseState(*(t.to(device, copy=True) for t in native))
    packed = PackedState(*(None if t is None else t.to(device, copy=True) for t in store))
    sources, stored = native_slots.to(device), store_slots.to(device)
    module.pack_slots(dense, sources, packed, stored, layout, **more)
    for omitted, targets in (("leave", torch.tensor([1, 3], device=device)), ("zero", sources)):
        module.unpack_slots(packed, stored, dense, targets, layout, omitted=omitted, **more)
    return (*dense, *packed)


# -- timing -----------------------------------------------------------------------------------------------------------


class Timer:
    """Device time of single calls, the L2 cold before each."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.dim, self.dtype = (16, torch.float32) if small else (D, torch.bfloat16)
        self.flush = torch.empty(1 if small else FLUSH_BYTES // 4, dtype=torch.int32, device=DEVICE)

    def __call__(self, call: Callable[[], object], budget_s: float = 0.6) -> tuple[float, float, float]:
        """Median, 20 % and 80 % quantile in seconds."""
        call()
        call()
        if DEVICE.type == "cpu":
            started = time.perf_counter()
            call()
            return (time.perf_counter() - started,) * 3
        pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        begun = time.perf_counter()
        while len(pairs) < 5 or (len(pairs) < 50 and time.perf_counter() - begun < budget_s):
            self.flush.zero_()
            torch.cuda._sleep(2_000_000)  # about a millisecond, in which the host issues every launch of the call
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            call()
            after.record()
            pairs.append((before, after))
            torch.cuda.synchronize()
        times = sorted(before.elapsed_time(after) / 1e3 for before, after in pairs)
        return statistics.median(times), times[len(times) // 5], times[len(times) * 4 // 5]


def ceilings(timer: Timer) -> dict[str, float]:
    side = 64 if timer.small else 8192
    a, b = (torch.randn(side, side, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(2**10 if timer.small else 2**29, dtype=torch.int32, device=DEVICE)
    target = torch.empty_like(source)
    return {
        "copy_bytes_per_s": 2 * source.nbytes / timer(lambda: target.copy_(source))[0],
        "bf16_flop_per_s": 2 * side**3 / timer(lambda: a @ b)[0],
    }


def peer(name: str) -> Callable[..., object] | None:
    """A function of flash-linear-attention, ``None`` where it is not installed."""
    module = "fla.ops.kda" if "kda" in name else "fla.ops.gated_delta_rule"
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError:
        return None


PEERS = {
    ("prefill", "gdn"): "chunk_gated_delta_rule",
    ("prefill", "kda"): "chunk_kda",
    ("decode", "gdn"): "fused_recurrent_gated_delta_rule",
    ("decode", "kda"): "fused_recurrent_kda",
}


def prefill_flop(tokens: int, H: int, chunk: int = 64) -> int:
    """As the blockwise form needs them, triangles counted as triangles (see ``bench_recurrences``)."""
    return tokens * H * (6 * D * D + 2 * chunk * D + 2 * chunk * D)


def time_prefill(report: Report, timer: Timer) -> None:
    kernels = importlib.import_module("dasc.fast.triton")
    shapes = [(1, 1024), (1, 4096), (1, 16384), (1, 65536), (8, 2048), (32, 1024)]
    for kind in ("gdn", "kda"):
        for H in (2,) if timer.small else (32, 96):
            for N, T in [(1, 20)] if timer.small else shapes:
                x = delta_rule_inputs(kind, N, T, H, timer.dim, timer.dtype)
                pool = torch.zeros(N, H, timer.dim, timer.dim, device=DEVICE)
                indices, bounds = torch.arange(N, device=DEVICE), torch.arange(N + 1, device=DEVICE) * T
                ours = getattr(kernels, f"prefill_{kind}")
                table = kernels.chunk_table(1, N * T, bounds, DEVICE)  # a server makes one a batch, for all layers
                seconds = timer(lambda: ours(**x, pool=pool, state_indices=indices, table=table))  # noqa: B023
                row = row_of("prefill", kind, seconds, N=N, T=T, H=H, flop=prefill_flop(N * T, H))
                row["share_of_matrix_rate"] = row["flop"] / seconds[0] / report.ceilings["bf16_flop_per_s"]
                theirs = peer(PEERS["prefill", kind])
                if theirs is not None:
                    other = timer(
                        lambda: theirs(  # noqa: B023
                            **x,  # noqa: B023
                            initial_state=pool,  # noqa: B023
                            output_final_state=True,
                            cu_seqlens=bounds,  # noqa: B023
                        )
                    )
                    row["peer_s"], row["times_faster_than_peer"] = other[0], other[0] / seconds[0]
                report.times.append(row)


def time_decode(report: Report, timer: Timer) -> None:
    for kind in ("gdn", "kda"):
        for H in (2,) if timer.small else (32, 96):
            for N in (2,) if timer.small else (1, 8, 32, 128):
                x = delta_rule_inputs(kind, 1, N, H, timer.dim, timer.dtype)
                x = {name: t.transpose(0, 1).contiguous() for name, t in x.items()}
                pool = torch.zeros(N, H, timer.dim, timer.dim, device=DEVICE)
                indices = torch.arange(N, device=DEVICE)
                ours = getattr(fast, f"decode_{kind}")
                seconds = timer(lambda: ours(**x, pool=pool, state_indices=indices, impl="triton"))  # noqa: B023
                moved = 2 * pool.nbytes + sum(t.nbytes for t in x.values()) + x["v"].nbytes
                row = row_of("decode", kind, seconds, N=N, H=H, bytes=moved)
                row["share_of_copy_bandwidth"] = moved / seconds[0] / report.ceilings["copy_bytes_per_s"]
                theirs = peer(PEERS["decode", kind])
                if theirs is not None:
                    other = timer(lambda: theirs(**x, initial_state=pool, output_final_state=True))  # noqa: B023
                    row["peer_s"], row["times_faster_than_peer"] = other[0], other[0] / seconds[0]
                report.times.append(row)


def time_packing(report: Report, timer: Timer) -> None:
    small = StateGeometry("small", "kda", 2, (0, 1), 2, 2, 16, 16)
    for name, geometry in {"small": small}.items() if timer.small else GEOMETRIES.items():
        for ranks in (1,) if timer.small else (1, 8):
            for checkpoints in (1,) if timer.small else (1, 8):
                for quantized in QUANTIZED:
                    for kept in (0.36,):  # the published share of Kimi-Linear at W_max = 16
                        local = geometry.shard(ranks)
                        native, store, layout = packing_pools(
                            local, kept, "ragged", DtypePolicy(quantized=quantized), checkpoints + 1
                        )
                        slots = torch.arange(1, checkpoints + 1, device=DEVICE)
                        stored = checkpoints * layout.slot_bytes
                        dense = checkpoints * local.dense_bytes(layout.dtypes)
                        read = checkpoints * (
                            layout.retained_units * local.unit_elements * layout.dtypes.temporal.itemsize
                            + layout.conv_slot_bytes
                        )
                        common = {"model": name, "ranks": ranks, "N": checkpoints, "quantized": quantized, "kept": kept}
                        calls = {
                            "pack": (
                                lambda: fast.pack_slots(native, slots, store, slots, layout, impl="triton"),  # noqa: B023
                                read + stored,
                            ),
                            "unpack_zero": (
                                lambda: fast.unpack_slots(store, slots, native, slots, layout, impl="triton"),  # noqa: B023
                                stored + dense,
                            ),
                            "unpack_leave": (
                                lambda: fast.unpack_slots(
                                    store,  # noqa: B023
                                    slots,  # noqa: B023
                                    native,  # noqa: B023
                                    slots,  # noqa: B023
                                    layout,  # noqa: B023
                                    omitted="leave",
                                    impl="triton",
                                ),
                                stored + read,
                            ),
                        }
                        for what, (call, moved) in calls.items():
                            seconds = timer(call, budget_s=0.3)
                            row = row_of(what, geometry.kind, seconds, bytes=moved, **common)
                            row["share_of_copy_bandwidth"] = moved / seconds[0] / report.ceilings["copy_bytes_per_s"]
                            report.times.append(row)


def row_of(what: str, kind: str, seconds: tuple[float, float, float], **facts: object) -> dict[str, object]:
    median, low, high = seconds
    return {"what": what, "kind": kind, **facts, "s": median, "s_20": low, "s_80": high}


# -- the command ------------------------------------------------------------------------------------------------------


def environment() -> dict[str, object]:
    facts: dict[str, object] = {"torch": torch.__version__, "dasc": importlib.metadata.version("dasc")}
    for package in ("triton", "fla-core"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = None
    if DEVICE.type == "cuda":
        properties = torch.cuda.get_device_properties(DEVICE)
        facts |= {"gpu": properties.name, "memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
    return facts


def show(report: Report) -> None:
    """The times as a table, one line a case."""
    for row in report.times:
        case = " ".join(f"{key}={row[key]}" for key in ("model", "ranks", "N", "T", "H", "quantized") if key in row)
        figures = [f"{float(row['s']) * 1e6:10.1f} us"]  # type: ignore[arg-type]
        for key in ("share_of_copy_bandwidth", "share_of_matrix_rate", "times_faster_than_peer"):
            if key in row:
                figures.append(f"{key} {row[key]:.2f}")
        print(f"{row['what']:13} {row['kind']:4} {case:44} {'  '.join(figures)}")


def finish(report: Report, out: Path | None, started: float) -> int:
    """Write what was measured; the exit status: 1 when the gate is red."""
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(vars(report), indent=1) + "\n")
    print(f"{time.perf_counter() - started:.0f} s")
    return 0 if all(row["ok"] for row in report.gate) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write everything measured to this JSON file")
    parser.add_argument("--check", action="store_true", help="tiny sizes, to see that the script works")
    arguments = parser.parse_args()
    try:
        fast.chosen_impl("triton", DEVICE)
    except ValueError as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 2
    report = Report(environment())
    started = time.perf_counter()
    gate_recurrences(report, arguments.check)
    gate_packing(report, arguments.check)
    red = [row for row in report.gate if not row["ok"]]
    print(f"gate: {len(report.gate) - len(red)} of {len(report.gate)} cases within budget")
    if red:
        for row in red:
            print(f"  beyond it: {row}")
    else:
        timer = Timer(arguments.check)
        report.ceilings = ceilings(timer)
        print("  ".join(f"{name} {value:.3g}" for name, value in report.ceilings.items()))
        for part in (time_prefill, time_decode, time_packing):
            part(report, timer)
        show(report)
    return finish(report, arguments.out, started)


if __name__ == "__main__":
    sys.exit(main())
