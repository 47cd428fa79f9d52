"""Every way in which a model's folder can be wrong is one line that names file, tensor, expected and found."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dasc.geometry import StateGeometry
from dasc.models import CheckpointError, read_checkpoint
from dasc.models.families import FAMILIES
from dasc.models.source import FolderSource
from dasc.models.synthetic import example_gate, write_checkpoint
from tests.models.folders import KDA, H, K, config, tensors, write, write_index

GDN = StateGeometry(
    family="qwen3_next",
    kind="gdn",
    num_blocks=5,
    recurrent_layers=(0, 1, 3),
    num_value_heads=H,
    num_key_heads=2,
    head_v_dim=2 * K,
    head_k_dim=K,
)
Change = Callable[[dict[str, Tensor]], None]


def put(name: str, tensor: Tensor) -> Change:
    return lambda named: named.update({name: tensor})


def drop(*names: str) -> Change:
    return lambda named: [named.pop(name) for name in list(named) if name.endswith(names)] and None


A_LOG = "model.layers.0.self_attn.A_log"
DT_BIAS = "model.layers.0.self_attn.dt_bias"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("1.self_attn.A_log"), r"expected A_log for .* blocks \[0, 1, 3\], found none for \[1\]"),
        (drop("3.self_attn.dt_bias"), r"expected dt_bias .*, found none for \[3\], as 'layers.3.self_attn.dt_bias'"),
        (drop("A_log", "dt_bias"), r"expected decay tensors named layers.N.self_attn.A_log and .dt_bias, found none"),
        (
            put("model.layers.2.self_attn.A_log", torch.zeros(H)),
            r"are \[0, 1, 3\] of 5, found .* of block 2: 'model.la",
        ),
        (put("model.layers.5.self_attn.A_log", torch.zeros(H)), r"found a decay tensor of block 5"),
        (put("layers.0.self_attn.A_log", torch.zeros(H)), r"expected one A_log of block 0, found '.*' and '.*'"),
        (put(A_LOG, torch.zeros(H + 1)), rf"'{A_LOG}': expected shape \[4\] or \[1, 1, 4, 1\], found \[5\]"),
        (put(A_LOG, torch.zeros(1, H)), rf"'{A_LOG}': expected shape .*, found \[1, 4\]"),
        (put(DT_BIAS, torch.zeros(H)), rf"'{DT_BIAS}': expected shape \[32\], found \[4\]"),
        (put(DT_BIAS, torch.zeros(H, K)), rf"'{DT_BIAS}': expected shape \[32\], found \[4, 8\]"),
        (put(A_LOG, torch.tensor([0, math.nan, 0, 0])), rf"'{A_LOG}': expected finite values, found 1 NaN"),
        (put(DT_BIAS, torch.full((H * K,), -math.inf)), rf"'{DT_BIAS}': expected finite values, found 32 NaN"),
        (put(A_LOG, torch.zeros(H, dtype=torch.int8)), rf"'{A_LOG}': a quantised decay tensor: .* found I8"),
        (put(A_LOG, torch.zeros(H).to(torch.float8_e4m3fn)), rf"'{A_LOG}': a quantised decay tensor: .* found F8_E4M3"),
    ],
)
def test_wrong_decay_tensors_are_named(change: Change, message: str, tmp_path: Path) -> None:
    named = tensors()
    change(named)
    with pytest.raises(CheckpointError, match=message) as error:
        read_checkpoint(write(tmp_path, named))
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_padded_A_log_is_refused_where_the_family_has_none(tmp_path: Path) -> None:
    gate = example_gate(GDN)
    for family in FAMILIES.values():
        if family.kind == "gdn":
            folder = write_checkpoint(tmp_path / family.name, family.name, gate, GDN)
            named = load_file(folder / "model.safetensors")
            name = next(name for name in named if name.endswith("A_log"))
            named[name] = torch.zeros(H + 1)
            save_file(named, folder / "model.safetensors")
            with pytest.raises(CheckpointError, match=r"expected shape \[4\], found \[5\]"):
                read_checkpoint(folder)


def test_a_folder_without_config_or_tensors_lists_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected a config.json, found no files"):
        read_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"expected a config.json, found pytorch_model.bin"):
        read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config()))
    with pytest.raises(CheckpointError, match=r"expected .safetensors files, found config.json, pytorch_model.bin"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json: expected JSON"),
        ("[]", "config.json: expected a JSON object, got list"),
        ('{"model_type": "llama"}', "unknown model_type 'llama'; known are qwen3_next, .*olmo_hybrid"),
        ('{"model_type": "kimi_linear"}', "config.json: linear_num_heads must be"),
        ('{"model_type": "kimi_linear", "text_config": 3}', "config.json: text_config must be an object"),
    ],
)
def test_a_wrong_config_is_named(text: str, message: str, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(tmp_path)


def test_a_model_without_recurrent_layers_says_so(tmp_path: Path) -> None:
    linear = {**dict(config()["linear_attn_config"]), "kda_layers": [], "full_attn_layers": [1, 2, 3, 4, 5]}  # type: ignore[call-overload]
    with pytest.raises(CheckpointError, match=r"config.json: .*no recurrent layers"):
        read_checkpoint(write(tmp_path, linear_attn_config=linear))


def test_a_giant_config_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    with open(tmp_path / "config.json", "r+b") as stream:
        stream.truncate(2**30)
    with pytest.raises(CheckpointError, match=r"config.json: expected at most 16777216 bytes, found 1073741824"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (
            {A_LOG: "gone.safetensors"},
            r"index.json: tensor '.*A_log' should lie in 'gone.safetensors', a file that is miss",
        ),
        (
            {A_LOG: "../model-00001-of-00002.safetensors"},
            r"should lie in '\.\./model-00001-of-00002.safetensors', a file",
        ),
        ({"model.layers.0.self_attn.A_log2": "x"}, r"should lie in 'x'"),
        ([], r"index.json: weight_map must be an object of strings"),
        ({A_LOG: 3}, r"index.json: weight_map must be an object of strings"),
    ],
)
def test_a_wrong_index_is_named(weight_map: object, message: str, tmp_path: Path) -> None:
    write(tmp_path, shards=2)
    if isinstance(weight_map, dict):
        path = tmp_path / "model.safetensors.index.json"
        weight_map = {**json.loads(path.read_text())["weight_map"], **weight_map}
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(tmp_path)


def test_an_index_that_names_a_tensor_the_shard_lacks_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, shards=2)
    path = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text())["weight_map"]
    right = weight_map[A_LOG]
    wrong = next(name for name in weight_map.values() if name != right)
    write_index(tmp_path, {**weight_map, A_LOG: wrong})
    with pytest.raises(CheckpointError, match=f"{wrong}: expected tensor '{A_LOG}' as .* says, found none"):
        read_checkpoint(tmp_path)


def test_a_tensor_twice_in_the_index_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, shards=2)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x", "a": "y"}}')
    with pytest.raises(CheckpointError, match=r"index.json: the key 'a' is given twice"):
        read_checkpoint(tmp_path)


def test_a_decay_tensor_in_two_files_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, shards=2, index=False)
    save_file({A_LOG: torch.zeros(H)}, tmp_path / "model-00003-of-00002.safetensors")
    with pytest.raises(CheckpointError, match=f"tensor '{A_LOG}': expected in one file, found in .* and model-00003"):
        read_checkpoint(tmp_path)


def test_a_second_copy_that_the_index_hides_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, shards=2)
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    other = next(name for name in weight_map.values() if name != weight_map[A_LOG])
    named = load_file(tmp_path / other)
    save_file({**named, A_LOG: torch.zeros(H)}, tmp_path / other)
    with pytest.raises(CheckpointError, match=f"{other}: tensor '{A_LOG}': expected in {weight_map[A_LOG]}"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("size", [0, 5, 8, 100, -1])
def test_a_truncated_shard_is_an_error(size: int, tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "model.safetensors"
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    with pytest.raises(CheckpointError, match=r"model.safetensors: .*(truncated|found only|expected JSON)"):
        read_checkpoint(tmp_path)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(CheckpointError, match=r"config.json: expected 1000000 bytes at byte 7, found \d+; .*changed"):
        FolderSource(tmp_path).read_range("config.json", 7, 1_000_007)


def test_a_huge_declared_header_is_refused_without_reading_it(tmp_path: Path) -> None:
    write(tmp_path)
    with open(tmp_path / "model.safetensors", "r+b") as stream:
        stream.write((2**31).to_bytes(8, "little"))
        stream.truncate(2**33)
    with pytest.raises(CheckpointError, match=r"model.safetensors: expected a safetensors header of at most 100000000"):
        read_checkpoint(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "model.safetensors").chmod(0)
    with pytest.raises(CheckpointError, match=r"model.safetensors: cannot be read: Permission denied"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.kind == "kda"])
def test_every_kda_family_names_the_shape_it_expects(family: str, tmp_path: Path) -> None:
    geometry = dataclasses.replace(KDA, family=family)
    write_checkpoint(tmp_path, family, example_gate(geometry), geometry)
    named = load_file(tmp_path / "model.safetensors")
    name = next(name for name in named if name.endswith("A_log"))
    save_file({**named, name: torch.zeros(H - 1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"expected shape \[4\] or \[1, 1, 4, 1\].*, found \[3\]"):
        read_checkpoint(tmp_path)
