from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dasc.cli.options import NameList, result_options, task_options, threads_option
from dasc.cli.output import give_result, output_folder, progress_bar, table_console

if TYPE_CHECKING:
    from dasc.eval.interventions import Accuracy, InterventionReport

DEFAULT_ARMS = "baseline,zero-full-kv,zero-linear,zero-both"


@click.command()
@click.argument("model")
@task_options(length=256, count=100)
@click.option(
    "--arms",
    type=NameList(),
    default=DEFAULT_ARMS,
    show_default=True,
    help="zero-temporal, too: it leaves the rows of the short convolution.",
)
@threads_option
@result_options("interventions.json", resumes=True)
def interventions(
    model: str, output: Path | None, as_json: bool, threads: int, tasks: tuple[str, ...] | None, **options: Any
) -> None:
    """Zero parts of MODEL's cached prefixes and see what each task needs: table 1(a).

    MODEL is the name of a bundled model or a folder. Each context is prefilled once; then its questions are asked from
    copies whose full-attention KV, recurrent states, or both, are zeroed. Answers are greedy and right when all their
    tokens are.
    """
    import torch

    from dasc.eval.interventions import InterventionSettings, measure_interventions
    from dasc.eval.task_runs import fitting_tasks
    from dasc.models.zoo import model_folder

    torch.set_num_threads(threads)
    settings = InterventionSettings(tasks=tasks or fitting_tasks(options["length"]), **options)
    with output_folder(output), progress_bar(len(settings.tasks)) as progress:
        units_path = None if output is None else output / "interventions.jsonl"
        report = measure_interventions(model_folder(model), settings, units_path=units_path, progress=progress)
    give_result("interventions.json", report.as_dict(), partial(_print, report), output=output, as_json=as_json)


def _print(report: InterventionReport) -> None:
    from rich.table import Table

    settings = report.settings
    title = f"{settings['model']}: share of right answers [95 % interval], {settings['length']} tokens"
    table = Table(title=title, title_justify="left")
    table.add_column("task", no_wrap=True)
    table.add_column("questions", justify="right")
    for arm in settings["arms"]:
        table.add_column(arm, justify="right", no_wrap=True)
    for task, arms in report.tasks.items():
        cells = [_cell(accuracy) for accuracy in arms.values()]
        table.add_row(task, str(next(iter(arms.values())).questions), *cells)
    table_console(140).print(table)


def _cell(accuracy: Accuracy) -> str:
    return f"{accuracy.share:.3f} [{accuracy.low:.2f}, {accuracy.high:.2f}]"
