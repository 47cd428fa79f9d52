from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dasc.cli.options import NameList
from dasc.cli.output import output_folder, progress_bar, table_console

if TYPE_CHECKING:
    from dasc.eval.interventions import Accuracy, InterventionReport

DEFAULT_ARMS = "baseline,zero-full-kv,zero-linear,zero-both"
_positive = click.IntRange(min=1)


@click.command()
@click.argument("model")
@click.option("--tasks", type=NameList(), help="Tasks, with commas between them; by default all that fit.")
@click.option(
    "--length", type=_positive, default=256, show_default=True, help="Tokens of an example and its questions."
)
@click.option("--count", type=_positive, default=100, show_default=True, help="Examples of each task.")
@click.option("--questions", type=_positive, default=4, show_default=True, help="Asked of an example, at most.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the examples.")
@click.option(
    "--arms",
    type=NameList(),
    default=DEFAULT_ARMS,
    show_default=True,
    help="zero-temporal, too: it leaves the rows of the short convolution.",
)
@click.option("--threads", type=click.IntRange(1, 256), default=1, show_default=True, help="Of torch.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for interventions.json; an interrupted run goes on from the same folder.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def interventions(
    model: str, output: Path | None, as_json: bool, threads: int, tasks: tuple[str, ...] | None, **options: Any
) -> None:
    """Zero parts of MODEL's cached prefixes and see what each task needs: table 1(a).

    MODEL is the name of a bundled model or a folder. Each context is prefilled once; then its questions are asked from
    copies whose full-attention KV, recurrent states, or both, are zeroed. Answers are greedy and right when all their
    tokens are.
    """
    import torch

    from dasc.eval.files import json_bytes, write_together
    from dasc.eval.interventions import InterventionSettings, measure_interventions
    from dasc.models.tasks import SHORTEST, TASKS
    from dasc.models.zoo import model_folder

    torch.set_num_threads(threads)
    fitting = tuple(task for task in TASKS if SHORTEST[task] <= options["length"])
    settings = InterventionSettings(tasks=fitting if tasks is None else tasks, **options)
    with output_folder(output), progress_bar(len(settings.tasks)) as progress:
        units_path = None if output is None else output / "interventions.jsonl"
        report = measure_interventions(model_folder(model), settings, units_path=units_path, progress=progress)
    if output is not None:
        write_together(output, {"interventions.json": json_bytes(report.as_dict())})
    if as_json:
        click.echo(json.dumps(report.as_dict(), indent=2, allow_nan=False))
        return
    _print(report)
    if output is not None:
        click.echo(f"written to {output}")


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
