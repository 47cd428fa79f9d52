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

    RECORDS is JSON: {"steps": [...], "transfers": [...]}, entries as in dasc.cache.records. Costs that the records do
    not settle are left out; simulate goes on estimating them.
    """
    from dasc.cache.simulation import calibrate as fit
    from dasc.cache.simulation import read_records
    from dasc.eval.files import json_bytes, write_together

    result = fit(*read_records(records))
    determined = result.determined
    report = {"costs": determined, "fits": [asdict(f) for f in result.fits], "unmeasured": result.unmeasured}
    text = json.dumps(report, indent=2, allow_nan=False)
    if output is not None:
        write_together(output.parent, {output.name: json_bytes(determined)})
    if as_json:
        click.echo(text)
        return
    for name, value in determined.items():
        click.echo(f"{name}: {value:.4g}")
    for f in result.fits:
        click.echo(
            f"{f.kind}: {f.rows:,} records fitted to {f.mean_error:.1%} in the mean, {f.worst_error:.1%} at worst; "
            f"total time {f.total_error:+.1%}"
        )
        if f.undetermined:
            click.echo(
                f"{f.kind}: left out, since the records do not tell apart or do not show: {', '.join(f.undetermined)}"
            )
    if result.unmeasured:
        click.echo(f"left out, since there is no record of: {', '.join(result.unmeasured)}")
