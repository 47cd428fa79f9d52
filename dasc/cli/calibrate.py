from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click


@click.command()
@click.argument("records", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Write the costs to this file, for simulate --cost."
)
@click.option("--json", "as_json", is_flag=True, help="Print costs and fits as JSON instead of text.")
def calibrate(records: Path, output: Path | None, as_json: bool) -> None:
    """Fit the simulator's costs to the forward passes and transfers measured in RECORDS.

    RECORDS is JSON: {"steps": [...], "transfers": [...]}, entries as in dasc.cache.records.
    """
    from dasc.cache.simulation import calibrate as fit
    from dasc.cache.simulation import read_records
    from dasc.eval.files import json_bytes, write_together

    result = fit(*read_records(records))
    measured = {name: value for name, value in asdict(result.cost).items() if name not in result.unmeasured}
    if output is not None:
        write_together(output.parent, {output.name: json_bytes(measured)})
    if as_json:
        fits = [asdict(f) for f in result.fits]
        click.echo(json.dumps({"costs": measured, "fits": fits, "unmeasured": result.unmeasured}, indent=2))
        return
    for name, value in measured.items():
        click.echo(f"{name}: {value:.4g}")
    for f in result.fits:
        click.echo(
            f"{f.kind}: {f.rows:,} records fitted to {f.mean_error:.1%} in the mean, {f.worst_error:.1%} at worst; "
            f"total time {f.total_error:+.1%}"
        )
        if f.undetermined:
            click.echo(f"{f.kind}: the records do not tell apart, or do not show: {', '.join(f.undetermined)}")
    if result.unmeasured:
        click.echo(f"no record of: {', '.join(result.unmeasured)}")
