from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dasc.cli.evaluate.prefixes import chosen_prefixes, prefix_options
from dasc.cli.options import result_options, threads_option
from dasc.cli.output import give_result, output_folder, progress_bar, table_console

if TYPE_CHECKING:
    from dasc.magnitudes import UnitMagnitudes

FILE = "magnitudes.json"
# the first one is that of the items that dasc eval quality asks by default
_SEED = 1


@click.command()
@click.argument("model")
@prefix_options(seed=_SEED)
@threads_option
@result_options(FILE, resumes=True)
def observe(
    model: str,
    threads: int,
    output: Path | None,
    as_json: bool,
    **which: Any,
) -> None:
    """Observe how large the units of MODEL's states are on prompts, for dasc plan --magnitudes.

    MODEL is the name of a bundled model or a folder of a small Qwen3-Next, OLMo-Hybrid or Kimi-Linear. Prefixes are
    chosen from --conversations as appendix A.2 does; without, they are contexts of the bundled models' tasks. They
    should be like what will be served: a unit that they leave empty counts as one that is never needed.
    """
    import torch

    from dasc.eval.magnitudes import measure_magnitudes
    from dasc.models.zoo import model_folder

    torch.set_num_threads(threads)
    folder = model_folder(model)
    prefixes, source = chosen_prefixes(folder, **which)
    with output_folder(output), progress_bar(len(prefixes)) as progress:
        found = measure_magnitudes(
            folder,
            prefixes,
            source=source,
            units_path=None if output is None else output / "magnitudes.jsonl",
            progress=progress,
        )
    give_result(FILE, found.as_dict(), partial(_print, found), output=output, as_json=as_json)


def _print(found: UnitMagnitudes) -> None:
    import torch
    from rich.table import Table

    shares = torch.tensor([0.0, 0.1, 0.5, 0.9, 1.0], dtype=torch.float64)
    prefixes = found.source["prefixes"]
    table = Table(title=f"Magnitudes of units over {len(prefixes)} prefixes, by recurrent layer", title_justify="left")
    table.add_column("layer", justify="right")
    for name in ("least", "10 %", "median", "90 %", "largest"):
        table.add_column(name, justify="right")
    for number, row in enumerate(found.values):
        table.add_row(str(number), *(f"{value:.3g}" for value in torch.quantile(row, shares).tolist()))
    table_console(80).print(table)
