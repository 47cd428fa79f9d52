from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dasc.cli.options import MAX_TOKENS, ByteSize, result_options
from dasc.cli.output import give_result, table_console
from dasc.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from dasc.cache.simulation import Load
    from dasc.eval.published import Prediction
    from dasc.eval.simulate import ArmResult

    Report = tuple[dict[str, Any], dict[str, bytes], Callable[[Console], None]]
    """Numbers as plain JSON values, figures as files, and what prints the numbers for people."""

ARM_NAMES = "dense,padded,ragged,int8,int4,storage,wr"
CLIENTS = {"shared-prefix": 16, "wildchat": 256}
"""Concurrency of the made-up loads, as published."""


def _sizes(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Sizes with commas between them: bytes, ascending, without repeats."""
    return None if value is None else tuple(sorted({ByteSize().convert(part, param, ctx) for part in value.split(",")}))


def _arms(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    """Names with commas between them, in the order given; repeats are dropped."""
    names = tuple(dict.fromkeys(part.strip() for part in value.split(",")))
    unknown = [name for name in names if name not in ARM_NAMES.split(",")]
    if unknown:
        raise click.BadParameter(f"expected names out of {ARM_NAMES}, got {unknown[0]!r}", ctx, param)
    return names


@click.command()
@click.argument("source", metavar="[TRACE|shared-prefix|wildchat]", default="wildchat")
@click.option(
    "--model", default="kimi-linear", show_default=True, help="kimi-linear, qwen3-next, kimi-k3, or see above."
)
@click.option(
    "--w-max", type=click.IntRange(4, MAX_TOKENS), help="Cutoff in tokens; the paper's operating point by default."
)
@click.option("--memory", type=ByteSize(), default="2GiB", show_default=True, help="State memory of one rank.")
@click.option("--sweep", metavar="SIZES", callback=_sizes, help="Several --memory, with commas; with -o also drawn.")
@click.option("--kv-memory", type=ByteSize(), default="40GiB", show_default=True, help="KV memory of one rank.")
@click.option("--kv-bytes-per-token", type=click.IntRange(min=1), help="On one rank; the family's own by default.")
@click.option("--tp", "ranks", type=click.IntRange(min=1), default=8, show_default=True, help="Tensor-parallel degree.")
@click.option(
    "--arms", metavar="NAMES", callback=_arms, default=ARM_NAMES, show_default=True, help="Ways to store checkpoints."
)
@click.option("--server-limit", type=click.IntRange(min=1), default=32, show_default=True, help="Running requests.")
@click.option(
    "--concurrency", type=click.IntRange(min=1), help="Conversations at a time; a TRACE's own times if not given."
)
@click.option(
    "--time-scale", type=float, default=1.0, show_default=True, help="Of a TRACE's own times; 0.5 is twice as fast."
)
@click.option("--block-tokens", type=click.IntRange(min=1), default=512, show_default=True, help="Tokens of a hash id.")
@click.option(
    "--chunk-tokens", type=click.IntRange(min=1), default=8192, show_default=True, help="Prefill of one pass."
)
@click.option("--mixed", is_flag=True, help="Let sequences decode in prefill passes, too.")
@click.option(
    "--refresh", type=click.Choice(["one-pass", "two-pass"]), default="one-pass", show_default=True, help="Of wr."
)
@click.option(
    "--native-slots", type=click.IntRange(min=1), help="Of arms with a compressed pool; 5/4 --server-limit by default."
)
@click.option(
    "--cost", "costs", multiple=True, metavar="NAME=S|FILE", help="Change a cost, or all that a JSON file names."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the made-up loads.")
@click.option("--published", is_flag=True, help="Predict the published equal-memory figures instead.")
@result_options("numbers and figures")
def simulate(published: bool, output: Path | None, as_json: bool, **options: Any) -> None:
    """Simulate serving a load with dense and compressed checkpoints in the same memory.

    The cache is the real one; forward passes and transfers only take time. The load is a TRACE of block hashes in the
    Mooncake format (JSON lines), `shared-prefix` (184 requests) or `wildchat` (256 conversations of four turns). MODEL
    is a name, a plan file, a checkpoint's folder or a Hub id. Costs are estimates for Hopper GPUs unless --cost says
    otherwise; `dasc calibrate` fits them to a measured run.
    """
    if published:
        _check_alone()
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)  # better now than after the work
    report, figures, show = _predict_published() if published else _simulate(draw=output is not None, **options)
    give_result(
        "simulate.json",
        report,
        lambda: show(table_console(170)),
        output=output,
        as_json=as_json,
        draw=lambda: figures,
    )


def _check_alone() -> None:
    """The published figures have a setting of their own: nothing else may be asked for."""
    context = click.get_current_context()
    for param in context.command.params:
        name = param.name or ""
        given = context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
        if given and name not in ("published", "output", "as_json"):
            what = param.opts[0] if isinstance(param, click.Option) else context.params[name]
            raise click.UsageError(f"--published takes only -o and --json, got {what} as well")


def _simulate(
    *,
    source: str,
    model: str,
    w_max: int | None,
    memory: int,
    sweep: tuple[int, ...] | None,
    kv_memory: int,
    kv_bytes_per_token: int | None,
    ranks: int,
    arms: tuple[str, ...],
    server_limit: int,
    concurrency: int | None,
    time_scale: float,
    block_tokens: int,
    chunk_tokens: int,
    mixed: bool,
    refresh: str,
    native_slots: int | None,
    costs: tuple[str, ...],
    seed: int,
    draw: bool,
) -> Report:
    from dasc.cache.simulation import Serving, parse_costs
    from dasc.eval.simulate import Memory, default_native_slots, kv_bytes, load_model, model_cost, run_arms

    if draw and sweep:
        from dasc.eval.simulate_figures import draw_sweep
    if sweep and click.get_current_context().get_parameter_source("memory") is click.core.ParameterSource.COMMANDLINE:
        raise click.UsageError("give either --memory or --sweep, not both")
    if concurrency is None:
        concurrency = CLIENTS.get(source)
    if concurrency is not None and time_scale != 1.0:
        raise click.UsageError("--time-scale is for a TRACE sent at its own times, without --concurrency")
    load = _load(source, seed, block_tokens)
    simulated = load_model(model, w_max)
    changes = parse_costs(costs)
    cost = model_cost(simulated, ranks, changes)
    estimated = [name for name in asdict(cost) if name not in changes]
    serving = Serving(
        server_limit=server_limit,
        concurrency=concurrency,
        time_scale=time_scale,
        chunk_tokens=chunk_tokens,
        mixed_passes=mixed,
        two_pass_refresh=refresh == "two-pass",
    )
    per_token = kv_bytes(simulated, ranks) if kv_bytes_per_token is None else kv_bytes_per_token
    slots = default_native_slots(server_limit) if native_slots is None else native_slots
    memories = [Memory(ranks, size, kv_memory, per_token, slots) for size in sweep or (memory,)]
    with _progress(len(load.requests)) as progress:
        results = run_arms(simulated, arms, load, memories, cost, serving, progress)
    title = f"{model}, W_max {simulated.w_max}, TP {ranks}, {load.name}: {len(load.requests):,} requests"
    figures = draw_sweep(results, title) if draw and sweep else {}
    report = {
        "model": model,
        "w_max": simulated.w_max,
        "ranks": ranks,
        "load": load.name,
        "serving": asdict(serving),
        "native_slots": slots,
        "kv_memory_bytes": kv_memory,
        "kv_bytes_per_token": per_token,
        "costs": asdict(cost),
        "estimated_costs": estimated,
        "results": [result.as_dict() for result in results],
    }

    def show(console: Console) -> None:
        _print_results(results, title, console)
        if estimated:
            which = f"These costs ({', '.join(estimated)})" if changes else "Costs"
            console.print(
                f"{which} are estimates for Hopper GPUs, not measured: see --cost and `dasc calibrate`.",
                soft_wrap=True,
            )

    return report, figures, show


def _load(source: str, seed: int, block_tokens: int) -> Load:
    from dasc.cache.simulation import read_trace, shared_prefix_load, wildchat_load

    if source == "shared-prefix":
        return shared_prefix_load(seed)
    if source == "wildchat":
        return wildchat_load(seed)
    if not Path(source).exists():
        raise click.UsageError(f"no file {source!r}: expected a TRACE, or a built-in load: {' or '.join(CLIENTS)}")
    return read_trace(source, tokens_per_id=block_tokens)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str, int], None]]:
    """A bar on standard error, started anew for each run."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("done"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda what, done: bar.update(task, description=what, completed=done)


def _print_results(results: list[ArmResult], title: str, console: Console) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("memory a rank", justify="right")
    table.add_column("arm")
    for header in ("native", "compressed", "hit tokens", "requests hit", "TTFT s", "P95", "E2E s", "P95"):
        table.add_column(header, justify="right")
    for header in ("evictions", "demotions", "moved"):
        table.add_column(header, justify="right", no_wrap=True)
    memory = None
    for r in results:
        table.add_row(
            "" if r.memory_bytes == memory else format_bytes(r.memory_bytes),
            r.arm,
            f"{r.native_slots:,}",
            f"{r.compressed_slots:,}",
            f"{r.token_hit_rate:.1%}",
            f"{r.request_hit_rate:.1%}",
            *(f"{seconds:.3f}" for seconds in (r.ttft_mean_s, r.ttft_p95_s, r.e2e_mean_s, r.e2e_p95_s)),
            ", ".join(f"{n:,} {cause}" for cause, n in sorted(r.evictions.items())) or "0",
            f"{r.demotions:,}",
            format_bytes(sum(r.moved_bytes.values())),
        )
        memory = r.memory_bytes
    console.print(table)
    causes = {cause for r in results for cause, n in r.evictions.items() if n}
    if causes == {"kv"}:
        console.print("Every eviction is by kv: KV memory, not state memory, limits hits here; see --kv-memory.")
    wall_s = sum(r.wall_s for r in results)
    console.print(f"{sum(r.requests for r in results) / wall_s:,.0f} requests simulated a second")


def _predict_published() -> Report:
    from dasc.eval.published import PUBLISHED, predict_published

    with _progress(len(PUBLISHED)) as progress:
        predictions = predict_published(progress=progress)

    def show(console: Console) -> None:
        _print_published(predictions, console)

    return {"predictions": [asdict(p) for p in predictions]}, {}, show


def _print_published(predictions: list[Prediction], console: Console) -> None:
    from rich.table import Table

    table = Table(
        title="Equal memory, 96 dense slots, TP 2, shared-prefix: published | predicted", title_justify="left"
    )
    for header in ("model", "arm"):
        table.add_column(header)
    for header in ("slots", "hit rate", "TTFT ms", "our slots", "with them: hit rate", "TTFT ms"):
        table.add_column(header, justify="right")
    for p in predictions:
        row = p.published
        fitted = " (fitted)" if row.arm == "dense" else ""
        table.add_row(
            row.model,
            row.arm,
            f"{row.slots}",
            f"{row.hit_rate:.3f} | {p.hit_rate:.3f}",
            f"{row.ttft_ms:.1f} | {p.ttft_ms:.1f}{fitted}",
            f"{p.own_slots}",
            f"{p.own_hit_rate:.3f}",
            f"{p.own_ttft_ms:.1f}",
            end_section=row.arm == "ragged",
        )
    console.print(table)
    scales = ", ".join(f"{p.published.model} {p.scale:.1f}" for p in predictions if p.published.arm == "dense")
    console.print(f"Factor on the estimated costs, fitted to the dense rows: {scales}.")
