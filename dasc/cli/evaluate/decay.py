from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dasc.cli.options import IntList, gate_input_option, result_options, task_options, threads_option
from dasc.cli.output import give_result, output_folder, progress_bar, table_console

if TYPE_CHECKING:
    from rich.console import Console

    from dasc.eval.decay import DecayReport


@click.command()
@click.argument("model")
@click.option("--w-max", type=click.IntRange(min=4), default=32, show_default=True, help="Cutoff in tokens.")
@gate_input_option
@task_options(length=512, count=16)
@click.option(
    "--ticks",
    type=IntList(0),
    default="0,1,2,4,8,16,32,64,128",
    show_default=True,
    help="Tokens since the hit at which to compare.",
)
@click.option(
    "--suffixes",
    type=IntList(0),
    default="0,4,8,16,32,64,128",
    show_default=True,
    help="New tokens of a prompt before its question.",
)
@threads_option
@result_options("decay.json and a figure", "tables", resumes=True)
def decay(
    model: str, output: Path | None, as_json: bool, threads: int, tasks: tuple[str, ...] | None, **options: Any
) -> None:
    """Measure how long after a hit an omission hurts, and whether MODEL's hits are worth a refresh.

    MODEL is the name of a bundled model or a folder. After a hit within a context the same tokens follow on the dense
    state, on one without the omitted units (nr), on one with them refreshed (wr) and on one of INT8; errors of states
    and predictions are compared as they go, next to the bound that holds for given inputs. Then questions are asked
    after new tokens, with hits refreshed never, always, or when fewer tokens than a threshold are new.
    """
    import torch

    from dasc.eval.decay import DecaySettings, measure_decay
    from dasc.eval.task_runs import fitting_tasks
    from dasc.models.zoo import model_folder

    if output is not None:  # better now than after the work
        from dasc.eval.decay.figures import draw_decay
    torch.set_num_threads(threads)
    settings = DecaySettings(tasks=tasks or fitting_tasks(options["length"]), **options)
    with output_folder(output), progress_bar(2 * len(settings.tasks)) as progress:
        units_path = None if output is None else output / "decay.jsonl"
        report = measure_decay(model_folder(model), settings, units_path=units_path, progress=progress)

    def show() -> None:
        console = table_console(118)
        _print_errors(report, console)
        _print_policies(report, console)

    give_result("decay.json", report.as_dict(), show, output=output, as_json=as_json, draw=lambda: draw_decay(report))


def _print_errors(report: DecayReport, console: Console) -> None:
    from rich.table import Table

    settings = report.settings
    title = f"{settings['model']}, W_max {settings['w_max']}: relative error by tokens since the hit"
    table = Table(title=title, title_justify="left")
    for header in ("", *map(str, settings["ticks"])):
        table.add_column(header, justify="right" if header else "left", no_wrap=True)

    def row(name: str, values: Sequence[float | None]) -> None:
        table.add_row(name, *("-" if value is None else f"{value:.1e}" for value in values))

    row("omitted units by weights", report.remaining)
    for arm, trace in report.traces["all"]["arms"].items():
        table.add_section()
        first = report.first_layer(arm)
        row(f"{arm}: bound, layer {first}", report.relative(arm, "bound", layer=first))
        row(f"{arm}: channel by channel, layer {first}", report.relative(arm, "estimate", layer=first))
        row(f"{arm}: layer {first}", report.relative(arm, "error", layer=first))
        row(f"{arm}: all layers", report.relative(arm, "error"))
        row(f"{arm}: given dense inputs", report.relative(arm, "given_inputs"))
        row(f"{arm}: divergence, nats", [None, *trace["kl"]])
        row(f"{arm}: other next token", [None, *trace["changed"]])
    console.print(table)
    worst = report.traces["all"]["arms"]["nr"]["error_over_bound"]
    console.print(f"largest error over its bound, by layer: {', '.join(f'{x:.3g}' for x in worst)}")


def _print_policies(report: DecayReport, console: Console) -> None:
    from rich.table import Table

    title = f"Refresh of {report.window_tokens} tokens or not, over all suffixes; dense is right in "
    table = Table(title=title + f"{report.dense_accuracy:.1%}", title_justify="left")
    for header in ("refresh", "tokens replayed", "accuracy loss [95 %]", "log-prob loss, nats [95 %]"):
        table.add_column(header, justify="right" if table.columns else "left", no_wrap=True)
    for policy in report.policies:
        cells = [
            f"{mean:+.3f} [{low:+.3f}, {high:+.3f}]" for mean, low, high in (policy.accuracy_loss, policy.log_prob_loss)
        ]
        table.add_row(policy.name, f"{policy.replayed_tokens:.1f}", *cells)
    console.print(table)
    for entry in report.settling:
        measured = "not within the ticks" if entry.measured is None else f"{entry.measured} tokens measured"
        console.print(
            f"{entry.tolerance:.0%} of an omission left after {entry.by_weights} tokens by weights, {measured}"
        )
