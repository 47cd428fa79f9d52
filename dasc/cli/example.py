from __future__ import annotations

from pathlib import Path

import click

MODELS = ("kimi-linear", "qwen3-next", "kimi-k3")


@click.command()
@click.argument("model", type=click.Choice(MODELS))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Folder to write.")
def example(model: str, output: Path) -> None:
    """Write a checkpoint of MODEL's shape and format with made-up decay parameters.

    Only what `dasc plan` reads is in it. The decays of kimi-linear are made so that W_max = 16 keeps as many key
    channels in each layer as its authors published; the others only resemble the published spread. It is no model to
    run.
    """
    from dasc.models.synthetic import GEOMETRIES, example_gate, published_kimi_linear, write_checkpoint

    if model == "kimi-linear":
        geometry, gate = published_kimi_linear()
    else:
        geometry = GEOMETRIES[model]
        gate = example_gate(geometry)
    write_checkpoint(output, geometry.family, gate, geometry)
    click.echo(f"{model}: decay parameters of {geometry.num_layers} recurrent layers written to {output}")
