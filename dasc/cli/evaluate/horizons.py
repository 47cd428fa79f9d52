from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dasc.cli.evaluate.prefixes import chosen_prefixes, prefix_options
from dasc.cli.options import gate_input_option, result_options, threads_option
from dasc.cli.output import give_result, output_folder, progress_bar, table_console

if TYPE_CHECKING:
    from dasc.eval.horizons import HorizonReport


@click.command()
@click.argument("model")
@prefix_options(seed=0)
@gate_input_option
@click.option("--epsilon", type=float, default=1e-3, show_default=True, help="Decay that counts as forgotten.")
@threads_option
@result_options("horizons.json and a figure", resumes=True)
def horizons(
    model: str,
    gate_input: float | None,
    epsilon: float,
    threads: int,
    output: Path | None,
    as_json: bool,
    **which: Any,
) -> None:
    """Compare the horizons of MODEL's weights with decays and states observed on prefixes: table 1(b).

    MODEL is the name of a bundled model or a folder of a small Qwen3-Next, OLMo-Hybrid or Kimi-Linear. Prefixes are
    chosen from --conversations as appendix A.2 does; without, they are contexts of the bundled models' tasks. Even
    prefixes choose a_s, odd ones validate the choice.
    """
    import torch

    from dasc.eval.horizons import HorizonSettings, measure_horizons
    from dasc.models.zoo import model_folder

    if output is not None:  # better now than after the work
        from dasc.eval.horizons.figures import draw_horizons
    torch.set_num_threads(threads)
    folder = model_folder(model)
    prefixes, source = chosen_prefixes(folder, **which)
    with output_folder(output), progress_bar(len(prefixes)) as progress:
        report = measure_horizons(
            folder,
            prefixes,
            HorizonSettings(gate_input, epsilon),
            source=source,
            units_path=None if output is None else output / "horizons.jsonl",
            progress=progress,
        )
    give_result(
        "horizons.json",
        report.as_dict(),
        partial(_print, report),
        output=output,
        as_json=as_json,
        draw=lambda: draw_horizons(report),
    )


def _print(report: HorizonReport) -> None:
    from rich.table import Table

    table = Table(title=f"{report.settings['model']}: Spearman correlation within layers", title_justify="left")
    table.add_column("a_s")
    table.add_column("prefixes", justify="right")
    table.add_column("layer")
    for pair in ("H_s, H_e", "H_s, M_S"):
        table.add_column(f"{pair}: median [IQR]", justify="right", no_wrap=True)
    for comparison, how in ((report.fixed, "fixed"), (report.calibrated, "calibrated")):
        pairs = (comparison.empirical, comparison.magnitude)
        first = (f"{comparison.gate_input:g} ({how})", str(len(comparison.prefixes)))
        table.add_row(*first, "all", *(_cell(pair.pooled) for pair in pairs))
        for number, block in enumerate(report.blocks):
            table.add_row("", "", f"block {block}", *(_cell(pair.layers[number]) for pair in pairs))
        table.add_section()
    table_console(110).print(table)


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value.median:.3f} [{value.q1:.3f}, {value.q3:.3f}]"
