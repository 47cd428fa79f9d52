from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dasc.cli.options import ByteSize, IntList, gate_input_option, result_options, task_options, threads_option
from dasc.cli.output import give_result, output_folder, progress_bar, table_console
from dasc.units import format_bytes

if TYPE_CHECKING:
    from dasc.eval.states import Measure
    from dasc.eval.tune import Choice, Loss, TuneReport

NOTHING_FITS = 1
"""Exit status when no measured point is within budget and memory."""


@click.command()
@click.argument("model")
@click.option(
    "--quality-budget",
    "budget",
    type=click.FloatRange(min=0),
    default=0.01,
    show_default=True,
    help="Largest loss: a share of answers (0.01 is one point), or nats an answer with --measure log-prob.",
)
@click.option("--memory", type=ByteSize(), default="5MiB", show_default=True, help="Of the checkpoint pool.")
@click.option("--measure", type=click.Choice(["accuracy", "log-prob"]), default="accuracy", show_default=True)
@click.option("--w-max", type=IntList(4), help="Cutoffs in tokens; by the length of the examples unless given.")
@click.option(
    "--magnitudes",
    "magnitudes_path",
    type=click.Path(path_type=Path),
    help="File of dasc observe: also try as many units as at each cutoff, those observed to be the largest.",
)
@gate_input_option
@task_options(length=256, count=50)
@threads_option
@result_options("tune.json and a figure", resumes=True)
def tune(
    model: str,
    budget: float,
    memory: int,
    measure: str,
    output: Path | None,
    as_json: bool,
    threads: int,
    tasks: tuple[str, ...] | None,
    w_max: tuple[int, ...] | None,
    magnitudes_path: Path | None,
    **options: Any,
) -> None:
    """Choose W_max, NR or WR and FP32, INT8 or INT4 for MODEL, by what they are measured to lose.

    MODEL is the name of a bundled model or a folder. Every way of storing checkpoints answers questions right after a
    hit; its losses are paired with dense checkpoints by example. Chosen is the way that holds most checkpoints in the
    memory with a loss that stays within the budget by its upper confidence limit. Exit status 1 says that none does.
    """
    import torch

    from dasc.eval.task_runs import fitting_tasks
    from dasc.eval.tune import TuneSettings, choose, measure_points
    from dasc.magnitudes import UnitMagnitudes
    from dasc.models.zoo import model_folder

    if output is not None:  # better now than after the work
        from dasc.eval.tune.figures import draw_tune
    torch.set_num_threads(threads)
    by: Measure = "accuracy" if measure == "accuracy" else "log_prob"
    settings = TuneSettings(w_max=w_max or (), tasks=tasks or fitting_tasks(options["length"]), **options)
    with output_folder(output), progress_bar(len(settings.tasks)) as progress:
        units_path = None if output is None else output / "tune.jsonl"
        report = measure_points(
            model_folder(model),
            settings,
            magnitudes=None if magnitudes_path is None else UnitMagnitudes.load(magnitudes_path),
            units_path=units_path,
            progress=progress,
        )
    choice = choose(report.points, budget=budget, memory_bytes=memory, dense_bytes=report.dense_bytes, measure=by)
    summary = {
        **report.as_dict(),
        "budget": budget,
        "measure": by,
        "memory_bytes": memory,
        "chosen": None if choice.point is None else choice.point.label,
        "front": list(choice.front),
        "explanation": list(choice.explanation),
    }
    give_result(
        "tune.json",
        summary,
        partial(_print, report, choice, memory),
        output=output,
        as_json=as_json,
        draw=lambda: draw_tune(report, choice, by, budget),
    )
    if output is not None and as_json:
        click.echo(f"written to {output}", err=True)
    if choice.point is None:
        click.echo(f"dasc: {choice.explanation[0]}", err=True)
        click.get_current_context().exit(NOTHING_FITS)


def _print(report: TuneReport, choice: Choice, memory: int) -> None:
    from rich.table import Table

    from dasc.accounting import usable_slots

    settings = report.settings
    title = (
        f"{settings['model']}: loss to dense over {report.examples} examples of {len(settings['tasks'])} tasks; "
        f"dense is right in {report.dense_accuracy:.1%}"
    )
    table = Table(title=title, title_justify="left")
    headers = ("", "bytes", "C_ckpt", "checkpoints", "replayed", "accuracy (up to)", "nats an answer (up to)", "front")
    for header in headers:
        table.add_column(header, justify="right" if header else "left", no_wrap=True)
    for point in report.points:
        table.add_row(
            point.label,
            format_bytes(point.checkpoint_bytes),
            f"{report.dense_bytes / point.checkpoint_bytes:.2f}",
            f"{usable_slots(memory, [point.checkpoint_bytes]):,}",
            str(point.replay_tokens) if point.replay_tokens else "-",
            _cell(point.accuracy),
            _cell(point.log_prob),
            "chosen" if point == choice.point else "x" if point.label in choice.front else "",
        )
    console = table_console(118)
    console.print(table)
    for line in choice.explanation:
        console.print(line)


def _cell(loss: Loss) -> str:
    return f"{loss.mean:+.4f} ({loss.upper:+.4f})"
