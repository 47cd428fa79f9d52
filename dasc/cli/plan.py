from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dasc.cli.options import ByteSize, IntList, gate_input_option
from dasc.cli.output import table_console
from dasc.cli.reading import read_with_progress
from dasc.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from dasc.geometry import Quantization
    from dasc.models import Checkpoint
    from dasc.planner import ModelSummary, RankSummary

STATE_DTYPES = ("float32", "bfloat16", "float16")


@click.command()
@click.argument("model")
@click.option("--w-max", type=IntList(4), default="16,64,128,512", show_default=True, help="Cutoffs in tokens.")
@gate_input_option
@click.option("--epsilon", type=float, default=1e-3, show_default=True, help="Decay that counts as forgotten.")
@click.option("--tp", "ranks", type=IntList(), default="1,2,4,8", show_default=True, help="Tensor-parallel degrees.")
@click.option(
    "--budget", type=ByteSize(), default="8GiB", show_default=True, help="State memory of one rank's checkpoint pool."
)
@click.option("--layout", type=click.Choice(["ragged", "padded"]), default="ragged", show_default=True)
@click.option("--int8", is_flag=True, help="Store the kept units as INT8.")
@click.option("--int4", is_flag=True, help="Store the kept units as INT4.")
@click.option(
    "--state-dtype",
    type=click.Choice(STATE_DTYPES),
    default="float32",
    show_default=True,
    help="Of the server's state.",
)
@click.option(
    "--conv-dtype",
    type=click.Choice(STATE_DTYPES),
    default="bfloat16",
    show_default=True,
    help="Of the server's convolution rows.",
)
@click.option(
    "--placement",
    type=click.Choice(["off", "storage", "hybrid"]),
    default="off",
    show_default=True,
    help="Placement that -o writes; the table compares all three.",
)
@click.option(
    "--random-mask",
    "mask_seed",
    type=click.IntRange(min=0),
    help="For comparison: -o keeps as many units, by this seed.",
)
@click.option(
    "--magnitudes",
    "magnitudes_path",
    type=click.Path(path_type=Path),
    help="File of dasc observe: keep as many units as the cutoff does, those observed to be the largest.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the plan to this file (one --w-max).")
@click.option("--revision", help="Branch, tag or commit on the Hub.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def plan(
    model: str,
    w_max: tuple[int, ...],
    gate_input: float | None,
    epsilon: float,
    ranks: tuple[int, ...],
    budget: int,
    layout: str,
    int8: bool,
    int4: bool,
    state_dtype: str,
    conv_dtype: str,
    placement: str,
    mask_seed: int | None,
    magnitudes_path: Path | None,
    output: Path | None,
    revision: str | None,
    as_json: bool,
) -> None:
    """Say what compressed state checkpoints of MODEL would save.

    MODEL is a folder with config.json and safetensors, or a Hub id such as moonshotai/Kimi-Linear-48B-A3B-Instruct.
    Of the weights only the decay parameters are read, beside the index and the headers of the files that hold them.
    """
    if output is not None and len(w_max) != 1:
        raise click.UsageError(f"-o writes one plan and needs one --w-max, got {','.join(map(str, w_max))}")
    if mask_seed is not None and output is None:
        raise click.UsageError("--random-mask is of the plan that -o writes; the table is of units chosen by horizon")
    if mask_seed is not None and magnitudes_path is not None:
        raise click.UsageError("give either --random-mask or --magnitudes, not both")
    if int8 and int4:
        raise click.UsageError("give either --int8 or --int4, not both")
    import torch

    from dasc.geometry import DtypePolicy
    from dasc.magnitudes import UnitMagnitudes
    from dasc.planner import build_plan, summarise

    checkpoint = read_with_progress(model, revision)
    ranks, dropped = _shareable(checkpoint, ranks)
    quantized: Quantization | None = "int8" if int8 else "int4" if int4 else None
    settings: dict[str, Any] = {
        "magnitudes": None if magnitudes_path is None else UnitMagnitudes.load(magnitudes_path),
        "gate_input": gate_input,
        "epsilon": epsilon,
        "ranks": ranks,
        "layout": layout,
        "dtypes": DtypePolicy(getattr(torch, state_dtype), getattr(torch, conv_dtype), quantized),
    }
    summary = summarise(checkpoint, w_max, budget_bytes=budget, **settings)
    if output is not None:
        written = build_plan(checkpoint, w_max[0], mode=placement, mask_seed=mask_seed, **settings)  # type: ignore[arg-type]
        written.save(output)
    if as_json:
        click.echo(json.dumps(as_dict(summary), indent=2, allow_nan=False))
        return
    console = table_console(118)
    print_summary(summary, console)
    if dropped:
        console.print(f"left out: TP {', '.join(map(str, dropped))}, by which the key heads cannot be shared equally")
    if output is not None:
        console.print(f"plan written to {output}", soft_wrap=True)


def _shareable(checkpoint: Checkpoint, ranks: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Degrees to tell of, and default ones that the heads do not divide by; one that was asked for fails clearly."""
    source = click.get_current_context().get_parameter_source("ranks")
    if source is not click.core.ParameterSource.DEFAULT:
        return ranks, ()
    kept = tuple(p for p in ranks if checkpoint.geometry.num_key_heads % p == 0)
    return kept, tuple(p for p in ranks if p not in kept)


def as_dict(summary: ModelSummary) -> dict[str, Any]:
    """The summary as plain JSON values."""
    from dataclasses import asdict

    from dasc.geometry import dtype_name

    checkpoint = summary.checkpoint
    geometry = checkpoint.geometry
    return {
        "model": checkpoint.source,
        "family": checkpoint.family.name,
        "quantization": checkpoint.quantization,
        "fingerprint": checkpoint.gate.fingerprint(),
        "geometry": asdict(geometry),
        "gate": checkpoint.gate.gate,
        "gate_lower_bound": checkpoint.gate.lower_bound,
        "gate_input": summary.gate_input,
        "gate_input_calibrated": checkpoint.family.calibrated,
        "epsilon": summary.epsilon,
        "magnitudes_sha256": summary.magnitudes_sha256,
        "layout": summary.layout,
        "temporal_dtype": dtype_name(summary.dtypes.temporal),
        "stored_dtype": summary.dtypes.stored_name,
        "conv_dtype": dtype_name(summary.dtypes.conv),
        "budget_bytes_per_rank": summary.budget_bytes,
        "dense_bytes": summary.dense_bytes,
        "dense_slots": {str(p): slots for p, slots in summary.dense_slots.items()},
        "windows": [_finite(asdict(window)) for window in summary.windows],
        "reading": asdict(checkpoint.reading),
    }


def _finite(window: dict[str, Any]) -> dict[str, Any]:
    """JSON has no infinity: a ratio to nothing stored is null."""
    return {name: None if value == float("inf") else value for name, value in window.items()}


def print_summary(summary: ModelSummary, console: Console) -> None:
    """The two tables: the whole model by ``W_max``, then each tensor-parallel degree."""
    from rich.table import Table

    from dasc.layout import storage_label

    checkpoint = summary.checkpoint
    geometry = checkpoint.geometry
    dense = format_bytes(summary.dense_bytes)
    unit = "heads" if geometry.kind == "gdn" else "key channels"
    console.print(f"{checkpoint.source}  {checkpoint.family.name}", style="bold", soft_wrap=True)
    console.print(
        f"{geometry.num_layers} {geometry.kind.upper()} layers of {geometry.num_blocks} blocks, "
        f"{geometry.num_value_heads} value and {geometry.num_key_heads} key heads of "
        f"{geometry.head_v_dim} x {geometry.head_k_dim}; {geometry.num_units:,} units ({unit})"
    )
    note = "" if checkpoint.family.calibrated else " (not calibrated for this family; a lower value keeps more)"
    console.print(
        f"{checkpoint.gate.gate} gate, a_s = {summary.gate_input:g}{note}, epsilon = {summary.epsilon:g}; "
        f"a dense checkpoint takes {dense}"
    )
    how = "Kept by W_max" if summary.magnitudes_sha256 is None else "As many units as by W_max, the largest observed"
    table = Table(title=f"{how} ({storage_label(summary.layout, summary.dtypes)})", title_justify="left")
    headers = ["W_max", "units kept", "share", "layers", "C_temp padded", "C_temp ragged", "C_ckpt", "checkpoint"]
    if geometry.kind == "kda":
        headers.insert(3, "mixed pairs")
    for header in headers:
        table.add_column(header, justify="right")
    for window in summary.windows:
        low, high = window.layer_fraction
        cells = [
            str(window.w_max),
            f"{window.units_kept:,}",
            f"{window.units_kept / window.units:.1%}",
            f"{low:.3f}-{high:.3f}",
            f"{window.c_temp_padded:.3f}",
            f"{window.c_temp_ragged:.3f}",
            f"{window.c_ckpt:.3f}",
            format_bytes(window.checkpoint_bytes),
        ]
        if window.mixed_pairs is not None:
            cells.insert(3, f"{window.mixed_pairs / window.pairs:.1%}")
        table.add_row(*cells)
    console.print(table)
    _print_ranks(summary, console)


def _print_ranks(summary: ModelSummary, console: Console) -> None:
    from rich.table import Table

    table = Table(
        title=f"Checkpoints in {format_bytes(summary.budget_bytes)} a rank, by the fullest rank: slots (compression)",
        title_justify="left",
    )
    for header in ("W_max", "TP", "dense", "off", "storage", "hybrid", "units moved"):
        table.add_column(header, justify="right")
    reasons = set()
    for window in summary.windows:
        by_degree: dict[int, dict[str, RankSummary]] = {}
        for entry in window.ranks:
            by_degree.setdefault(entry.ranks, {})[entry.mode] = entry
            if entry.unavailable is not None:
                reasons.add(f"{entry.mode}: {entry.unavailable}")
        for p, modes in by_degree.items():
            cells = [
                f"{e.slots:,} ({e.compression:.3f})" if e.unavailable is None else "n/a"
                for e in (modes[m] for m in ("off", "storage", "hybrid"))
            ]
            moved = [modes[m] for m in ("storage", "hybrid") if modes[m].unavailable is None]
            table.add_row(
                str(window.w_max),
                str(p),
                f"{summary.dense_slots[p]:,}",
                *cells,
                " / ".join(f"{e.moved_units:,}" for e in moved) or "n/a",
                end_section=p == list(by_degree)[-1],
            )
    console.print(table)
    for reason in sorted(reasons):
        console.print(f"n/a {reason}")
    read = summary.checkpoint.reading
    console.print(f"read {format_bytes(read.total_bytes)} from {len(read.files)} files in {read.seconds:.2f} s")
