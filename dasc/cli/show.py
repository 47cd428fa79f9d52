from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dasc.cli.reading import read_with_progress
from dasc.units import format_bytes

if TYPE_CHECKING:
    from dasc.plan import SelectionPlan


@click.command()
@click.argument("plan_file", metavar="PLAN", type=click.Path(path_type=Path))
@click.option("--model", help="Also check that the plan was made for this model: a folder or a Hub id.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def show(plan_file: Path, model: str | None, as_json: bool) -> None:
    """Say what the plan in the file PLAN holds."""
    from dasc.plan import SelectionPlan

    plan = SelectionPlan.load(plan_file)
    if model is not None:
        checkpoint = read_with_progress(model, None)
        plan.check_geometry(checkpoint.geometry)
        plan.check_weights(checkpoint.gate.fingerprint())
    facts = describe(plan)
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        if name == "placements":
            for placement in value:
                click.echo(
                    f"TP {placement['ranks']}: {placement['mode']}, units a rank {placement['stored_units']}, "
                    f"{placement['moved_units']} moved, slot {format_bytes(placement['slot_bytes'])}"
                )
        else:
            click.echo(f"{name}: {value}")
    if model is not None:
        click.echo(f"made for the weights of {model}")


def describe(plan: SelectionPlan) -> dict[str, Any]:
    """The plan's contents as plain JSON values; masks as counts."""
    from dasc.accounting import checkpoint_compression
    from dasc.geometry import dtype_name

    geometry = plan.geometry
    whole = plan.layouts(1) if 1 in plan.placements else None
    return {
        "family": plan.family,
        "kind": geometry.kind,
        "recurrent_layers": geometry.num_layers,
        "blocks": geometry.num_blocks,
        "value_heads": geometry.num_value_heads,
        "key_heads": geometry.num_key_heads,
        "head_v_dim": geometry.head_v_dim,
        "head_k_dim": geometry.head_k_dim,
        "w_max": plan.w_max,
        "gate_input": plan.gate_input,
        "epsilon": plan.epsilon,
        "units_kept": int(plan.mask.sum()),
        "units": geometry.num_units,
        "kept_by_layer": plan.mask.sum(dim=1).tolist(),
        "longest_window": int(plan.windows.max()),
        "layout": plan.layout,
        "temporal_dtype": dtype_name(plan.dtypes.temporal),
        "stored_dtype": plan.dtypes.stored_name,
        "conv_dtype": dtype_name(plan.dtypes.conv),
        "dense_bytes": geometry.dense_bytes(plan.dtypes),
        "c_ckpt": None if whole is None else round(checkpoint_compression(geometry, whole), 4),
        "fingerprint": plan.fingerprint,
        "format_version": plan.format_version,
        "placements": [
            {
                "ranks": ranks,
                "mode": placement.mode,
                "computed_units": list(placement.local_units),
                "stored_units": list(placement.stored_units),
                "moved_units": placement.moved_units,
                "slot_bytes": max(layout.slot_bytes for layout in plan.layouts(ranks)),
            }
            for ranks, placement in sorted(plan.placements.items())
        ],
    }
