from __future__ import annotations

from pathlib import Path

import click

from dasc.cli.evaluate.quality_report import RESULT_FILE, report
from dasc.cli.options import result_options
from dasc.cli.output import output_folder


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@result_options("numbers and figures")
def compare(files: tuple[Path, ...], output: Path | None, as_json: bool) -> None:
    """Put arms that were measured one by one into one table, with paired differences by item.

    FILES are results of dasc eval quality, or the folders that they are in. Arms of one model must have been asked the
    same items by the same protocol.
    """
    from dasc.eval.quality.results import merge, read_result

    with output_folder(output):
        paths = [path / RESULT_FILE if path.is_dir() else path for path in files]
        fit = report(merge([read_result(path) for path in paths]), output, as_json)
    if not fit:
        click.get_current_context().exit(1)
