"""A runnable model's folder as transformers writes it: config.json and .safetensors files, with an index if several."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from dasc.models.config import Config, parse_json, quantization_method
from dasc.models.errors import CheckpointError
from dasc.models.hybrid.config import HybridConfig
from dasc.models.hybrid.config_form import config_json, read_config

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def load_hybrid(folder: str | Path) -> tuple[HybridConfig, dict[str, Tensor]]:
    """Configuration and weights of a small model, all read into memory in their stored dtypes.

    Args:
        folder: with config.json and model.safetensors, or the shards that model.safetensors.index.json names.

    Raises:
        CheckpointError: a ``ValueError``, for files that are missing, damaged or quantised.
        ValueError: as :func:`~dasc.models.hybrid.config.read_config`.
    """
    folder = Path(folder)
    values = _read_json(folder / CONFIG_FILE)
    where = str(folder / CONFIG_FILE)
    method = quantization_method(Config(values, where))
    if method is not None:
        raise CheckpointError(f"{where}: weights must not be quantised to be run, found {method}")
    config = read_config(values, where)
    if not (folder / INDEX_FILE).exists():
        return config, _read_tensors(folder / WEIGHTS_FILE)
    weight_map = _read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not all(_is_file_name(name) for name in weight_map.values()):
        raise CheckpointError(f"{folder / INDEX_FILE}: weight_map must be an object of file names in the same folder")
    shards = {name: _read_tensors(folder / name) for name in sorted(set(weight_map.values()))}
    for tensor, name in weight_map.items():
        if tensor not in shards[name]:
            raise CheckpointError(f"{folder / name}: expected the tensor {tensor}, which the index places there")
    return config, {tensor: shards[name][tensor] for tensor, name in weight_map.items()}


def save_hybrid(folder: str | Path, config: HybridConfig, weights: Mapping[str, Tensor]) -> None:
    """Write a model that :func:`load_hybrid` reads back equal and, without the safe gate, transformers too.

    Args:
        folder: made if it does not exist; its config.json and model.safetensors are overwritten.
        config: of the model.
        weights: all of its tensors, by name.

    Raises:
        ValueError: for sizes that the family's config.json cannot say.
    """
    folder = Path(folder)
    text = json.dumps(config_json(config), indent=2) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
    # not save_file(): its errors hide the system's own, such as a full disk
    (folder / WEIGHTS_FILE).write_bytes(safetensors.torch.save(tensors, metadata={"format": "pt"}))
    (folder / CONFIG_FILE).write_text(text)


def _read_json(path: Path) -> dict[str, object]:
    try:
        return parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or 'no such file'}") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path}: expected a safetensors file ({error})") from error


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and name == Path(name).name
