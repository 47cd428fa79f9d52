from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dasc.cli.evaluate.items import chosen_items, item_options
from dasc.cli.evaluate.quality_report import report
from dasc.cli.options import DEFAULT_MODEL, IntList, result_options, threads_option
from dasc.cli.output import output_folder, progress_bar

if TYPE_CHECKING:
    from dasc.eval.items import Item
    from dasc.eval.quality.protocol import Protocol
    from dasc.eval.quality.results import QualityResult

METHOD_NAMES = "dense,nr,wr,random,padded,int8,int4,observed,int8-all,int4-all"
DEFAULT_METHODS = "dense,nr,wr,random"
DEFAULT_SLOTS = 512

_BUNDLED = ("model", "arms", "w_max", "slots", "magnitudes")
_SERVER = ("arm", "api", "served_model")
_positive = click.IntRange(min=1)


@click.command()
@click.argument("source", default="tasks")
@item_options
@click.option("--model", help=f"A bundled model or the folder of a small one; {DEFAULT_MODEL} by default.")
@click.option("--arms", metavar="NAMES", help=f"Out of {METHOD_NAMES}; {DEFAULT_METHODS} by default.")
@click.option("--w-max", type=IntList(4), help="Cutoffs in tokens; by default a grid that suits the prompts.")
@click.option("--magnitudes", type=click.Path(path_type=Path), help="For the arm 'observed': the file of dasc observe.")
@click.option("--slots", type=_positive, help=f"Checkpoint slots of every arm; {DEFAULT_SLOTS} by default.")
@click.option("--url", help="Of an OpenAI-compatible server, in place of a bundled model.")
@click.option("--arm", metavar="LABEL", help="With --url: how it was started: 'dense', 'nr 16', 'random 16 1234'.")
@click.option("--api", type=click.Choice(["completions", "chat"]), help="With --url; completions by default.")
@click.option("--served-model", metavar="NAME", help="With --url: whom to ask; the server's first model by default.")
@click.option("--api-key", envvar="OPENAI_API_KEY", default="", show_envvar=True, help="With --url: a bearer token.")
@click.option("--replays", type=_positive, help="Measured rounds; by default what the items say.")
@click.option("--block", "block_items", type=_positive, default=192, show_default=True, help="Most items warm at once.")
@click.option("--concurrency", type=_positive, default=32, show_default=True, help="Clients.")
@click.option("--server-limit", type=_positive, default=16, show_default=True, help="Bundled: most running requests.")
@click.option("--prefill-tokens", type=_positive, default=512, show_default=True, help="Bundled: most of a step.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of order and sampling.")
@click.option("--controlled", is_flag=True, help="Check what is resident in each block; status 1 if a check fails.")
@click.option("--ops", type=click.Choice(["fast", "reference"]), default="fast", show_default=True, help="Operators.")
@threads_option
@result_options("numbers and figures", resumes=True)
def quality(
    source: str,
    url: str | None,
    block_items: int,
    concurrency: int,
    replays: int | None,
    temperature: float,
    seed: int,
    controlled: bool,
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure answers when prompts are served from compressed checkpoints (table 2, appendix C.2).

    SOURCE is "tasks", those of the bundled models; "ruler"; or a file of JSON lines (dasc eval items tells more). The
    cache is flushed, filled by one unscored request a prefix, and then every prompt is measured; outputs are scored hit
    or not. All arms share prompts, order, seeds and slot counts, and hold compressed checkpoints only, but for dense.

    With --url a server is measured as it was started, one arm a run; dasc eval compare puts several arms together. The
    server must report cached tokens (SGLang: --enable-cache-report).
    """
    for name in _BUNDLED if url else _SERVER:
        if options[name] is not None:
            raise click.UsageError(f"--{name.replace('_', '-')} is for runs {'without' if url else 'with'} --url")
    from dasc.eval.quality.protocol import Protocol, paper_controls

    if output is not None:  # better now than after the work
        import dasc.eval.quality.figures  # noqa: F401
    protocol = Protocol(
        block_items=block_items,
        slots=None if url else options["slots"] or DEFAULT_SLOTS,
        concurrency=concurrency,
        replays=replays,
        seed=seed,
        temperature=temperature,
        controls=paper_controls(concurrency) if controlled else None,
    )
    item_names = ("tasks", "lengths", "count", "item_seed", "tokenizer", "depths")
    with output_folder(output):
        items = chosen_items(source, **{name: options.pop(name) for name in item_names})
        if url:
            result = _run_server(items, protocol, source, output, url, **options)
        else:
            result = _run_bundled(items, protocol, source, output, **options)
        fit = report([result], output, as_json)
    if not fit:
        click.get_current_context().exit(1)


def _run_bundled(
    items: list[Item], protocol: Protocol, source: str, output: Path | None, **options: Any
) -> QualityResult:
    from dasc.eval.quality.engine_backend import EngineLimits
    from dasc.eval.quality.evaluate import total_requests
    from dasc.eval.quality.runs import bundled_arms, run_bundled

    limits = EngineLimits(**{name: options[name] for name in ("server_limit", "prefill_tokens", "ops", "threads")})
    names = DEFAULT_METHODS if options["arms"] is None else options["arms"]
    methods = [name.strip() for name in names.split(",")]
    arms = bundled_arms(items, methods, options["w_max"])
    model = options["model"] or DEFAULT_MODEL
    with progress_bar(total_requests(items, arms, protocol)) as progress:
        return run_bundled(
            items,
            model,
            arms,
            protocol,
            limits,
            source=source,
            magnitudes=options["magnitudes"],
            output=output,
            progress=progress,
        )


def _run_server(
    items: list[Item], protocol: Protocol, source: str, output: Path | None, url: str, **options: Any
) -> QualityResult:
    from dasc.eval.quality.arms import ArmSpec
    from dasc.eval.quality.evaluate import total_requests
    from dasc.eval.quality.http import Http
    from dasc.eval.quality.runs import run_server
    from dasc.eval.quality.server_backend import ServerBackend

    if options["arm"] is None:
        raise click.UsageError("--url needs --arm: how the server was started, such as 'dense' or 'nr 16'")
    spec = ArmSpec.parse(options["arm"])
    http = Http(url, key=options["api_key"])
    server = ServerBackend(http, options["api"] or "completions", options["served_model"])
    with progress_bar(total_requests(items, [spec], protocol)) as progress:
        return run_server(items, server, spec, protocol, source=source, output=output, progress=progress)
