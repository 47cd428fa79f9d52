from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dasc.cli.options import DEFAULT_MODEL, ByteSize, IntList, result_options, threads_option
from dasc.cli.output import give_result, output_folder, progress_bar, table_console
from dasc.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from dasc.eval.conversations import Limits, Turn
    from dasc.eval.replay import ArmReport
    from dasc.layout import LayoutKind
    from dasc.models.hybrid import WindowKV

DEFAULT_COUNT = {"questions": 48, "made up": 24}
BUNDLED_W_MAX = 64
ARM_NAMES = "dense,nr,wr,auto,padded,int8,int4,random,compressed-only,off"


def _arms(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    """Names with commas between them, in the order given; repeats are dropped."""
    names = tuple(dict.fromkeys(part.strip() for part in value.split(",")))
    unknown = [name for name in names if name not in ARM_NAMES.split(",")]
    if unknown:
        raise click.BadParameter(f"expected names out of {ARM_NAMES}, got {unknown[0]!r}", ctx, param)
    return names


_positive = click.IntRange(min=1)


@click.command()
@click.argument("conversations", required=False, type=click.Path(path_type=Path))
@click.option(
    "--model",
    default=DEFAULT_MODEL,
    show_default=True,
    help="A bundled model (kda, kda-safe, gdn) or the folder of a small Qwen3-Next, OLMo-Hybrid or Kimi-Linear.",
)
@click.option(
    "--arms",
    metavar="NAMES",
    callback=_arms,
    default="dense,nr,wr,int4",
    show_default=True,
    help=f"Out of {ARM_NAMES}.",
)
@click.option("--w-max", type=IntList(4), help="Cutoffs in tokens; 64 by default, 16 for a Kimi-Linear of one's own.")
@click.option("--memory", type=ByteSize(), default="5MiB", show_default=True, help="State memory of each arm.")
@click.option(
    "--kv-tokens",
    type=click.IntRange(1, 1 << 30),
    help="KV of each arm, apart; that of all conversations by default, at most 262144.",
)
@click.option("--concurrency", type=_positive, default=256, show_default=True, help="Clients.")
@click.option("--server-limit", type=_positive, default=8, show_default=True, help="Most running requests.")
@click.option("--prefill-tokens", type=_positive, default=256, show_default=True, help="Most prompt tokens of a step.")
@click.option("--seeds", type=_positive, default=5, show_default=True, help="Runs of each arm.")
@click.option("--layout", type=click.Choice(["ragged", "padded"]), default="ragged", show_default=True)
@click.option(
    "--window-kv",
    type=click.Choice(["replayed", "cached"]),
    default="replayed",
    show_default=True,
    help="What replayed tokens of wr and auto attend to in their window: K/V of their own, or the cache's.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.1,
    show_default=True,
    help="Of auto: share of what was omitted that may be left, by the horizons, when the answer begins.",
)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--turns", type=_positive, default=4, show_default=True, help="First turns of each conversation.")
@click.option("--count", type=_positive, help="Conversations: the first ones of a file (all by default), or made-up.")
@click.option("--max-new-tokens", type=_positive, default=1024, show_default=True, help="Longer answers are cut.")
@click.option("--max-context", type=_positive, default=16_384, show_default=True, help="Most tokens of a turn.")
@click.option("--shrink", type=_positive, default=32, show_default=True, help="Divides the lengths of made-up chats.")
@click.option("--ops", type=click.Choice(["fast", "reference"]), default="fast", show_default=True, help="Operators.")
@threads_option
@result_options("numbers, records and a figure")
def replay(
    conversations: Path | None,
    model: str,
    output: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Serve multi-turn CONVERSATIONS with dense and compressed checkpoints in the same state memory.

    A real model answers, here, on the CPU. CONVERSATIONS is a file of JSON lines, {"messages": [{"role", "content"}]}
    or {"conversations": [{"from", "value"}]}. Without one, a bundled model is told things and asked about them, as it
    was trained to be, so that answers are right or wrong; any other model serves made-up chats with lengths like
    WildChat's. Prompts are frozen, so that all arms see the same. A client sends its next turn when the last is
    answered. Figures are of all requests, misses included, for each seed, and then means over the seeds.
    """
    if output is not None:  # better now than after the work
        from dasc.eval.replay_figures import draw_replay
        from dasc.eval.replay_files import records_json
    with output_folder(output):
        reports, settings = _run(conversations, model, **options)
    summary = {"settings": settings, "arms": [report.as_dict() for report in reports]}
    title = f"{settings['requests']} requests, {format_bytes(settings['memory_bytes'])} of state memory"

    def show() -> None:
        _print_reports(reports, title, table_console(150))

    def draw() -> dict[str, bytes]:
        return {"records.json": records_json(reports), **draw_replay(reports, title)}

    give_result("replay.json", summary, show, output=output, as_json=as_json, draw=draw)


def _run(
    path: Path | None,
    name: str,
    *,
    arms: tuple[str, ...],
    w_max: tuple[int, ...] | None,
    memory: int,
    kv_tokens: int | None,
    concurrency: int,
    server_limit: int,
    prefill_tokens: int,
    seeds: int,
    layout: LayoutKind,
    window_kv: WindowKV,
    tolerance: float,
    temperature: float,
    turns: int,
    count: int | None,
    max_new_tokens: int,
    max_context: int,
    shrink: int,
    ops: str,
    threads: int,
) -> tuple[list[ArmReport], dict[str, Any]]:
    """The reports, and all settings as plain JSON values."""
    import torch

    from dasc.eval.conversations import Limits
    from dasc.eval.replay import Protocol, default_kv_tokens, replay
    from dasc.eval.replay_arms import Serving
    from dasc.eval.served_model import load_served
    from dasc.eval.simulate import DEFAULT_W_MAX
    from dasc.models.zoo import MODELS, model_folder

    torch.set_num_threads(threads)
    folder, bundled = model_folder(name), name in MODELS
    served = load_served(folder, importlib.import_module(f"dasc.{ops}"))
    limits = Limits(turns, max_new_tokens, max_context)
    source = str(path) if path is not None else "questions" if bundled else "made up"
    chats = _conversations(path, source, count, shrink, limits, folder, served.model.config.vocab_size)
    usual_w_max = BUNDLED_W_MAX if bundled else DEFAULT_W_MAX[served.checkpoint.family.name]
    protocol = Protocol(arms, w_max or (usual_w_max,), concurrency, seeds, temperature)
    kv_tokens = kv_tokens or default_kv_tokens(chats)
    serving = Serving(memory, kv_tokens, server_limit, prefill_tokens, layout, window_kv, tolerance)
    requests = sum(map(len, chats))
    with progress_bar(requests * seeds * len(protocol.runs)) as progress:
        reports = replay(chats, protocol, served, serving, progress)
    settings = {
        "model": name,
        "source": source,
        **({"shrink": shrink} if source == "made up" else {}),
        "conversations": len(chats),
        "requests": requests,
        "prompt_tokens": sum(len(turn.prompt) for chat in chats for turn in chat),
        "answer_tokens": sum(turn.answer_tokens for chat in chats for turn in chat),
        "limits": asdict(limits),
        **asdict(protocol),
        **asdict(serving),
        "ops": ops,
        "threads": threads,
    }
    return reports, settings


def _conversations(
    path: Path | None, source: str, count: int | None, shrink: int, limits: Limits, folder: Path, vocab_size: int
) -> list[list[Turn]]:
    from dasc.eval.chat_tokens import chat_tokens
    from dasc.eval.conversation_files import read_conversations
    from dasc.eval.conversations import conversation_turns, generate_conversations
    from dasc.eval.question_conversations import question_conversations

    if path is not None:
        return read_conversations(path, chat_tokens(folder, vocab_size), limits, vocab_size, count)
    count = count or DEFAULT_COUNT[source]
    if source == "questions":
        return question_conversations(count, limits)
    tokens = chat_tokens(folder, vocab_size)
    chats = generate_conversations(count, turns=limits.turns, scale=1 / shrink)
    return [conversation_turns(chat, tokens, limits, vocab_size) for chat in chats]


def _print_reports(reports: Sequence[ArmReport], title: str, console: Console) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("arm", no_wrap=True)
    headers = ["W_max", "C_ckpt", "slots", "held", "hit\ntokens", "hit\nat all", "TTFT s (P95)", "E2E s (P95)"]
    for header in [*headers, "TTFT /\ndense", "tokens\nrefreshed", "same\noutput", "differ\nat"]:
        table.add_column(header, justify="right")
    answers_known = reports[0].mean["right"] is not None
    if answers_known:
        table.add_column("right\nanswers", justify="right")
    dense = next((report for report in reports if report.label == "dense"), None)
    for report in reports:
        mean, split = report.mean, report.prepared.split
        table.add_row(
            report.label,
            "-" if report.w_max is None else str(report.w_max),
            f"{report.prepared.compression:.2f}",
            f"{split.native_slots} + {split.compressed_slots}" if split.compressed_slots else str(split.native_slots),
            f"{mean['checkpoints_held']:.1f}",
            f"{mean['token_hit_rate']:.1%}",
            f"{mean['request_hit_rate']:.1%}",
            f"{mean['ttft_mean_s']:.3f} ({mean['ttft_p95_s']:.3f})",
            f"{mean['e2e_mean_s']:.3f} ({mean['e2e_p95_s']:.3f})",
            "-" if dense is None else f"{report.ratio(dense, 'ttft_mean_s'):.3f}",
            f"{mean['refresh_tokens']:,.0f}",
            "-" if mean["same_output"] is None else f"{mean['same_output']:.1%}",
            "-" if mean["first_difference"] is None else f"{mean['first_difference']:.1f}",
            *([f"{mean['right']:.1%}"] if answers_known else []),
        )
    console.print(table)
