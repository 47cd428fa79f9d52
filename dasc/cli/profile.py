from __future__ import annotations

from pathlib import Path

import click

from dasc.cli.options import MAX_TOKENS, IntList, gate_input_option
from dasc.cli.reading import read_with_progress


@click.command()
@click.argument("model")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder for figures and numbers.")
@click.option(
    "--w-max",
    type=click.IntRange(1, MAX_TOKENS),
    help="Cutoff of the maps; 16 tokens, or 64 with a safe gate, by default.",
)
@click.option("--w-grid", type=IntList(4), default="16,64,128,512", show_default=True, help="Cutoffs of the summary.")
@gate_input_option
@click.option("--epsilon", type=float, default=1e-3, show_default=True, help="Decay that counts as forgotten.")
@click.option("--revision", help="Branch, tag or commit on the Hub.")
def profile(
    model: str,
    output: Path,
    w_max: int | None,
    w_grid: tuple[int, ...],
    gate_input: float | None,
    epsilon: float,
    revision: str | None,
) -> None:
    """Draw how MODEL forgets: one-step decays, horizons by head, retained fractions, one layer's channels.

    Writes PNG and SVG figures and the numbers behind them as profile.json.
    """
    from dasc.eval.files import json_bytes, write_together
    from dasc.eval.profile import profile_model
    from dasc.eval.profile_figures import draw_profile

    result = profile_model(
        read_with_progress(model, revision), w_max=w_max, w_grid=w_grid, gate_input=gate_input, epsilon=epsilon
    )
    files = draw_profile(result) | {"profile.json": json_bytes(result.as_dict())}
    for path in write_together(output, files):
        click.echo(str(path))
