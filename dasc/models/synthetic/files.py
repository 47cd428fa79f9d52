"""Writes a checkpoint's config.json and .safetensors files in its family's own form."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from dasc.geometry import StateGeometry
from dasc.models.checkpoint import CONFIG_FILE
from dasc.models.config import Config
from dasc.models.decay_tensors import DECAY_DTYPES
from dasc.models.families import Family, family_of_name
from dasc.models.gate_parameters import GateParameters
from dasc.models.safetensors_header import LENGTH_BYTES
from dasc.models.tensor_reader import INDEX_FILE, SINGLE_FILE

_MARK = "dasc_synthetic"


class _Item(NamedTuple):
    """One tensor to write; without ``data`` it is a hole of zeros."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    data: bytes | None


def write_checkpoint(
    folder: str | Path,
    family: str,
    gate: GateParameters,
    geometry: StateGeometry,
    *,
    decay_dtype: torch.dtype = torch.float32,
    filler_bytes: int = 0,
    filler_tensors: int = 1,
    shards: int = 1,
    quantization: str | None = None,
) -> Path:
    """Write a model's folder that :func:`~dasc.models.read_checkpoint` reads as the real ones.

    Names, shapes, layer lists, nesting and index are those of the family's own checkpoints. Tensors of zeros in each
    block stand for its other weights; they are written as holes, so that gigabytes take neither time nor disk.

    Args:
        folder: to write into; made if it is missing. Files of an earlier call are replaced.
        family: registry name, e.g. ``"kimi_linear"``.
        gate: decay parameters, rounded to ``decay_dtype``.
        geometry: of the whole model; its own ``family`` may be another one of the same kind.
        decay_dtype: float64, float32, float16 or bfloat16.
        filler_bytes: of other weights in all; rounded up to 8 bytes a tensor.
        filler_tensors: other weights in each block; models with many experts have thousands.
        shards: number of files, each with a run of consecutive blocks; with more than one there is an index.
        quantization: ``quant_method`` to name in config.json.

    Returns:
        The folder.

    Raises:
        ValueError: for a folder that holds anything else, a geometry or gate that the family cannot express, or
            arguments outside their range.
    """
    writer = family_of_name(family)
    gate.check_geometry(geometry)
    dtype = next((name for name, torch_dtype in DECAY_DTYPES.items() if torch_dtype == decay_dtype), None)
    if dtype is None:
        raise ValueError(f"decay_dtype must be one of {list(DECAY_DTYPES.values())}, got {decay_dtype}")
    if not 1 <= shards <= geometry.num_blocks:
        raise ValueError(f"shards must be within [1, {geometry.num_blocks}], got {shards}")
    if filler_bytes < 0:
        raise ValueError(f"filler_bytes must not be negative, got {filler_bytes}")
    if filler_tensors < 1:
        raise ValueError(f"filler_tensors must be at least 1, got {filler_tensors}")
    config = {**writer.example_config(geometry, gate), _MARK: True}
    if quantization is not None:
        config["quantization_config"] = {"quant_method": quantization}
    _check_expressed(writer, config, geometry, gate)
    path = Path(folder)
    _clear(path)
    # First, so that a folder left half written is known as this function's own.
    (path / CONFIG_FILE).write_text(json.dumps(config, indent=2))

    filler = -(-filler_bytes // (8 * geometry.num_blocks * filler_tensors)) * 8
    items = list(_items(writer, geometry, gate, dtype, filler, filler_tensors))
    weight_map: dict[str, str] = {}
    total = 0
    for shard in range(shards):
        name = SINGLE_FILE if shards == 1 else f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        mine = [item for block, item in items if block * shards // geometry.num_blocks == shard]
        _write_shard(path / name, mine)
        weight_map.update({item.name: name for item in mine})
        total += sum(item.num_bytes for item in mine)
    if shards > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (path / INDEX_FILE).write_text(json.dumps(index, indent=2))
    return path


def _check_expressed(family: Family, config: dict[str, object], geometry: StateGeometry, gate: GateParameters) -> None:
    """Raise unless the config says just this geometry and gate."""
    top = Config(config, CONFIG_FILE)
    text = top.section("text_config") or top
    if family.kind != geometry.kind or family.lower_bound(text) != gate.lower_bound:
        raise ValueError(
            f"{family.name} models are {family.kind}, with the gate that their config gives; cannot express "
            f"{geometry.kind} with the {gate.gate} gate and lower bound {gate.lower_bound}"
        )
    if dataclasses.replace(family.geometry(text), family=geometry.family) != geometry:
        raise ValueError(f"a config of {family.name} cannot express {geometry}")


def _clear(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise ValueError(f"folder must be a folder, {path} is a file")
    path.mkdir(parents=True, exist_ok=True)
    if not any(path.iterdir()):
        return
    config = path / CONFIG_FILE
    if not config.is_file() or f'"{_MARK}": true' not in config.read_text(errors="replace"):
        raise ValueError(f"folder must be empty or written by write_checkpoint, {path} is neither")
    for old in [*path.glob("model*.safetensors"), path / INDEX_FILE]:
        old.unlink(missing_ok=True)


def _items(
    family: Family, geometry: StateGeometry, gate: GateParameters, dtype: str, filler: int, filler_tensors: int
) -> Iterator[tuple[int, _Item]]:
    """``(block, tensor)``, in file order."""
    layer_of = {block: layer for layer, block in enumerate(geometry.recurrent_layers)}
    for block in range(geometry.num_blocks):
        name = f"{family.prefix}layers.{block}"
        for expert in range(filler_tensors):
            yield block, _Item(f"{name}.mlp.experts.{expert}.down_proj.weight", "U8", (filler,), filler, None)
        if block in layer_of:
            layer = layer_of[block]
            a_log = gate.A_log[layer]
            shape = family.A_log_shape(geometry.num_value_heads)
            padding = torch.zeros(max(shape) - a_log.numel(), dtype=a_log.dtype)
            yield block, _decay_item(f"{name}.{family.module}.A_log", torch.cat([a_log, padding]).view(shape), dtype)
            yield block, _decay_item(f"{name}.{family.module}.dt_bias", gate.dt_bias[layer].flatten(), dtype)


def _decay_item(name: str, values: Tensor, dtype: str) -> _Item:
    stored = values.to(DECAY_DTYPES[dtype]).contiguous()
    data = stored.view(torch.uint8).numpy().tobytes()
    return _Item(name, dtype, tuple(stored.shape), len(data), data)


def _write_shard(path: Path, items: list[_Item]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for item in items:
        end = position + item.num_bytes
        header[item.name] = {"dtype": item.dtype, "shape": item.shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as stream:
        stream.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        start = stream.tell()
        for item in items:
            if item.data is None:
                stream.seek(item.num_bytes, 1)
            else:
                stream.write(item.data)
        stream.truncate(start + position)
