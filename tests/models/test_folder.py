"""Reading a model's folder: what is found, and how little is read for it."""

from __future__ import annotations

import json
import math
import sys
import threading
from pathlib import Path

import pytest
import torch

from dasc.models import CheckpointError, read_checkpoint
from dasc.models.synthetic import GEOMETRIES, example_gate, write_checkpoint
from dasc.reference.horizons import static_horizons
from dasc.reference.selection import select_units
from tests.models.folders import KDA, H, K, L, config, tensors, values, write, write_index


def assert_values(folder: Path) -> None:
    checkpoint = read_checkpoint(folder)
    a_log, dt_bias = values()
    assert checkpoint.geometry == KDA
    assert torch.equal(checkpoint.gate.A_log, a_log.double())
    assert torch.equal(checkpoint.gate.dt_bias, dt_bias.double())


# What is found


@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model.", "language_model.", ""])
def test_values_are_read_head_major_under_every_prefix(prefix: str, tmp_path: Path) -> None:
    """Fault 30: no row of ``dt_bias`` is constant, and no two values are equal."""
    assert_values(write(tmp_path, tensors(prefix)))


@pytest.mark.parametrize(("shards", "index"), [(1, False), (1, True), (3, True), (3, False), (11, True)])
def test_one_file_or_several_with_or_without_index(shards: int, index: bool, tmp_path: Path) -> None:
    assert_values(write(tmp_path, shards=shards, index=index))


def test_the_shape_of_A_log_does_not_matter(tmp_path: Path) -> None:
    named = {name: t.flatten() if "A_log" in name else t for name, t in tensors().items()}
    assert_values(write(tmp_path, named))


@pytest.mark.parametrize("shape", [(H,), (1, 1, H, 1), (H + 5,), (1, 1, H + 5, 1)])
def test_kimi_k3_counts_the_first_heads_of_a_longer_A_log(shape: tuple[int, ...], tmp_path: Path) -> None:
    named = tensors("language_model.model.")
    for name, tensor in named.items():
        if name.endswith("A_log"):
            padding = torch.full((math.prod(shape) - H,), math.nan)
            named[name] = torch.cat([tensor.flatten(), padding]).view(shape)
    write(tmp_path, named)
    text = config()
    text["linear_attn_config"] = {**dict(text["linear_attn_config"]), "gate_lower_bound": -5.0}  # type: ignore[call-overload]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k3", "text_config": text}))
    checkpoint = read_checkpoint(tmp_path)
    assert (checkpoint.family.name, checkpoint.gate.gate, checkpoint.gate.lower_bound) == ("kimi_k3", "safe", -5.0)
    assert torch.equal(checkpoint.gate.A_log, values()[0].double())
    assert torch.equal(checkpoint.gate.dt_bias, values()[1].double())


def test_next_token_layers_are_ignored(tmp_path: Path) -> None:
    named = tensors()
    for name in ("mtp.layers.0", "model.mtp.layers.0", "model.layers.5", "model.layers.6"):
        named[f"{name}.self_attn.A_log"] = torch.zeros(3)
    assert_values(write(tmp_path, named, num_nextn_predict_layers=1))


def test_values_around_a_threshold_keep_their_side_in_bf16(tmp_path: Path) -> None:
    """Fault 29: with ``W_max`` at the horizon of one BF16 value, the values one BF16 step away fall on either side."""
    step = torch.tensor([-1.75, -1.7578125, -1.765625], dtype=torch.bfloat16)
    assert len(step.unique()) == 3
    named = {name: step.repeat(11)[: H * K].clone() if "dt_bias" in name else t for name, t in tensors().items()}
    gate = read_checkpoint(write(tmp_path, named)).gate
    assert torch.equal(gate.dt_bias[0].flatten()[:3], step.double())
    horizons = static_horizons(gate, -0.3)[0, :3]
    assert select_units(horizons[None], float(horizons[1])).tolist() == [[False, False, True]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_stored_dtype_reaches_fp64_unrounded(dtype: torch.dtype, tmp_path: Path) -> None:
    named = {name: torch.randn(t.shape, dtype=torch.float64).to(dtype) for name, t in tensors().items()}
    gate = read_checkpoint(write(tmp_path, named)).gate
    for layer, block in enumerate(KDA.recurrent_layers):
        assert torch.equal(gate.A_log[layer], named[f"model.layers.{block}.self_attn.A_log"].double().flatten())


def test_the_quantisation_is_named(tmp_path: Path) -> None:
    assert read_checkpoint(write(tmp_path)).quantization is None
    write(tmp_path, quantization_config={"quant_method": "compressed-tensors"})
    assert read_checkpoint(tmp_path).quantization == "compressed-tensors"


@pytest.mark.parametrize(
    ("content", "method"),
    [
        ({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}, "NVFP4"),
        ({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}, None),
        ({"quant_algo": "FP8"}, "FP8"),
        ({}, None),
    ],
)
def test_the_quantisation_of_modelopt_has_a_file_of_its_own(
    content: dict[str, object], method: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "hf_quant_config.json"
    path.write_text(json.dumps(content))
    checkpoint = read_checkpoint(write(tmp_path))
    assert checkpoint.quantization == method
    assert checkpoint.reading.files == ("config.json", "hf_quant_config.json", "model.safetensors")
    assert checkpoint.reading.config_bytes == path.stat().st_size + (tmp_path / "config.json").stat().st_size
    checkpoint = read_checkpoint(write(tmp_path, quantization_config={"quant_method": "fp8"}))
    assert checkpoint.quantization == "fp8"
    assert "hf_quant_config.json" not in checkpoint.reading.files


def test_a_folder_is_named_by_path_or_string(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    write(tmp_path / "org" / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (Path("org/model"), "org/model", "./org/model", "~/org/model", str(tmp_path / "org" / "model")):
        assert read_checkpoint(name).geometry == KDA


@pytest.mark.parametrize("model", ["./no/such", "/no/such", "~/no/such", Path("no/such")])
def test_a_missing_folder_is_not_looked_for_on_the_hub(model: str | Path) -> None:
    with pytest.raises(CheckpointError, match=r"no/such: expected a model's folder, found nothing"):
        read_checkpoint(model)


def test_a_file_and_a_revision_of_a_folder_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    monkeypatch.chdir(tmp_path.parent)
    for file in (tmp_path / "model.safetensors", f"{tmp_path.name}/config.json"):
        with pytest.raises(CheckpointError, match=rf"{file}: expected a model's folder, found a file"):
            read_checkpoint(file)
    with pytest.raises(ValueError, match="revision is for models on the Hub, got 'main'"):
        read_checkpoint(tmp_path, revision="main")
    with pytest.raises(ValueError, match="model must be a path or a string, got NoneType"):
        read_checkpoint(None)  # type: ignore[arg-type]


def test_progress_counts_files(tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    read_checkpoint(write(tmp_path, shards=2), progress=lambda *step: steps.append(step))
    index = [("index", 0, 1), ("index", 1, 1)]
    assert steps == [*index, ("headers", 1, 2), ("headers", 2, 2), ("tensors", 1, 2), ("tensors", 2, 2)]


# How little is read and done


def _python_calls(folder: Path) -> int:
    """Calls of Python functions in all threads while a checkpoint is read."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        read_checkpoint(folder)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return calls


@pytest.mark.parametrize("shards", [1, 5])
def test_other_tensors_cost_no_python_call_each(shards: int, tmp_path: Path) -> None:
    """Kimi-K3's index and headers name some 750,000 tensors."""
    calls = []
    for filler_tensors in (1, 2000):
        folder = tmp_path / str(filler_tensors)
        write_checkpoint(
            folder, "kimi_linear", example_gate(KDA), KDA, filler_bytes=8, filler_tensors=filler_tensors, shards=shards
        )
        calls.append(_python_calls(folder))
    assert calls[1] - calls[0] < 200


def test_only_the_bytes_of_the_decay_tensors_are_read(tmp_path: Path) -> None:
    write(tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    reading = read_checkpoint(tmp_path).reading
    assert reading.header_bytes == 8 + int.from_bytes(data[:8], "little")
    assert reading.tensor_bytes == L * (H + H * K) * 4
    assert reading.config_bytes == (tmp_path / "config.json").stat().st_size
    assert reading.index_bytes == 0
    assert reading.files == ("config.json", "model.safetensors")
    assert reading.seconds > 0


def test_shards_without_decay_tensors_are_not_opened(tmp_path: Path) -> None:
    write(tmp_path, shards=2)
    weight_map = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    (tmp_path / "other.safetensors").write_bytes(b"not a safetensors file")
    write_index(tmp_path, {**weight_map, "lm_head.weight": "other.safetensors"})
    assert_values(tmp_path)
    assert "other.safetensors" not in read_checkpoint(tmp_path).reading.files


def test_beside_a_model_file_without_index_other_files_are_not_opened(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "consolidated.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    assert_values(tmp_path)
    assert read_checkpoint(tmp_path).reading.files == ("config.json", "model.safetensors")


def _bytes_read() -> int:
    """Bytes that this process has asked the kernel for so far."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the kernel counts reads only on Linux")
@pytest.mark.parametrize("shards", [1, 4])
def test_a_plan_of_gigabytes_reads_less_than_two_megabytes_beyond_headers(shards: int, tmp_path: Path) -> None:
    """At the size of Kimi-K3, with decay tensors in BF16; counted by the reader and, apart from it, by the kernel."""
    geometry, gate = GEOMETRIES["kimi-k3"], example_gate(GEOMETRIES["kimi-k3"])
    write_checkpoint(
        tmp_path, "kimi_k3", gate, geometry, decay_dtype=torch.bfloat16, filler_bytes=shards * 2**31 + 1, shards=shards
    )
    assert min(path.stat().st_size for path in tmp_path.glob("*.safetensors")) > 2_000_000_000
    before = _bytes_read()
    reading = read_checkpoint(tmp_path).reading
    counted = _bytes_read() - before
    exact = geometry.num_layers * (128 + 96 * 128) * 2
    assert reading.tensor_bytes == exact < 2 * 2**20
    assert 0 <= counted - reading.total_bytes < 4096  # the rest is /proc itself
