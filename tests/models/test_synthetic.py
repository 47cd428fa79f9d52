"""Made-up checkpoints: real formats, wanted counts, and the published figures of Kimi-Linear."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from dasc.geometry import StateGeometry
from dasc.models import FAMILIES, read_checkpoint
from dasc.models.synthetic import (
    GEOMETRIES,
    PUBLISHED_KIMI_LINEAR_COUNTS,
    example_gate,
    gate_with_counts,
    published_kimi_linear,
    write_checkpoint,
)
from dasc.reference.horizons import mixed_pairs, one_step_decay, retained_fractions, static_horizons
from dasc.reference.selection import select_units

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def small(family: str, recurrent: tuple[int, ...] = (0, 1, 2, 4), blocks: int = 6) -> StateGeometry:
    kind = FAMILIES[family].kind
    return StateGeometry(
        family=family,
        kind=kind,
        num_blocks=blocks,
        recurrent_layers=recurrent,
        num_value_heads=4,
        num_key_heads=4 if kind == "kda" else 2,
        head_v_dim=16 if kind == "kda" else 32,
        head_k_dim=16,
    )


# Geometries of the paper's models


@pytest.mark.parametrize(
    ("name", "layers", "units", "temporal", "conv"),
    [
        ("kimi-linear", 20, 81_920, 41_943_040, 1_474_560),
        ("qwen3-next", 36, 1_152, 75_497_472, 1_769_472),
        ("kimi-k3", 69, 847_872, 434_110_464, 15_261_696),
    ],
)
def test_geometries_have_the_published_sizes(name: str, layers: int, units: int, temporal: int, conv: int) -> None:
    geometry = GEOMETRIES[name]
    assert (geometry.num_layers, geometry.num_units) == (layers, units)
    assert (geometry.temporal_bytes(), geometry.conv_bytes()) == (temporal, conv)


# Published counts


def test_the_published_counts_are_met_by_layer_and_rank_and_kind_of_pair() -> None:
    geometry, gate = published_kimi_linear()
    mask = select_units(static_horizons(gate, -0.3), 16.0)
    by_rank = mask.view(20, 2, 16 * 128).sum(dim=2).T
    assert torch.equal(by_rank, torch.tensor(PUBLISHED_KIMI_LINEAR_COUNTS))
    assert by_rank.sum(dim=1).tolist() == [14_787, 14_602]
    assert mixed_pairs(retained_fractions(mask, geometry)) == (389, 215, 36)
    assert mask[geometry.recurrent_layers.index(21)].double().mean() == pytest.approx(0.375, abs=5e-4)  # figure 7


def test_other_cutoffs_give_about_the_published_capacities() -> None:
    _, gate = published_kimi_linear()
    horizons = static_horizons(gate, -0.3)
    for w_max, fraction in ((64, 0.112), (128, 0.035), (512, 0.0015)):
        assert (horizons > w_max).double().mean() == pytest.approx(fraction, rel=0.1)
    assert one_step_decay(gate, -0.3).median() == pytest.approx(0.471, abs=0.02)


def test_the_published_gate_is_the_same_every_time() -> None:
    assert published_kimi_linear()[1].fingerprint() == published_kimi_linear()[1].fingerprint()


# Wanted counts


@given(st.sampled_from(list(FAMILIES)), st.integers(0, 2**31 - 1), st.sampled_from([4, 16, 64, 1024]), st.booleans())
def test_the_wanted_units_are_retained_in_every_stored_dtype(family: str, seed: int, w_max: int, a_layer: bool) -> None:
    geometry = small(family)
    rng = torch.Generator().manual_seed(seed)
    heads = (geometry.num_layers, geometry.num_value_heads)
    wanted = torch.randint(0, geometry.units_per_head + 1, heads, generator=rng)
    wanted = wanted.sum(dim=1) if a_layer else wanted
    a_s = FAMILIES[family].default_gate_input
    gate = gate_with_counts(geometry, wanted, w_max=w_max, a_s=a_s, seed=seed)
    gate.check_geometry(geometry)
    for dtype in DTYPES:
        stored = dataclasses.replace(gate, A_log=gate.A_log.to(dtype).double(), dt_bias=gate.dt_bias.to(dtype).double())
        mask = select_units(static_horizons(stored, a_s), w_max).view(*heads, -1)
        assert torch.equal(mask.sum(dim=(1, 2)) if a_layer else mask.sum(dim=2), wanted)


def test_counts_differ_at_other_cutoffs_and_between_seeds() -> None:
    geometry = small("kimi_linear")
    wanted = torch.tensor([3, 20, 40, 60])
    gates = [gate_with_counts(geometry, wanted, w_max=64, a_s=-0.3, seed=seed) for seed in (0, 0, 1)]
    assert gates[0].fingerprint() == gates[1].fingerprint() != gates[2].fingerprint()
    counts = [int((static_horizons(gates[0], -0.3) > w).sum()) for w in (16, 64, 256)]
    assert counts[0] > counts[1] == 123 > counts[2]


@pytest.mark.parametrize("epsilon", [1e-3, 1e-2])
def test_epsilon_is_that_of_the_horizon(epsilon: float) -> None:
    geometry = small("qwen3_next")
    wanted = torch.tensor([0, 1, 2, 4])
    gate = gate_with_counts(geometry, wanted, w_max=64, a_s=0.1, epsilon=epsilon)
    assert torch.equal((static_horizons(gate, 0.1, epsilon) > 64).sum(dim=1), wanted)


@pytest.mark.parametrize(
    ("retained", "options", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), {}, r"retained must be integers, \[4, 4\] or \[4\], got .* \[3\]"),
        (torch.zeros(4), {}, r"retained must be integers, .* got torch.float32"),
        (torch.full((4, 4), 17), {}, r"retained must be within \[0, 16\] units a head, got 17 to 17"),
        (torch.full((4, 4), -1), {}, r"retained must be within"),
        (torch.full((4,), 65), {}, r"65 units cannot be spread over 4 heads of 0 to 16"),
        (
            torch.zeros(4, dtype=torch.int64),
            {"w_max": 1.5},
            r"w_max must be finite and above 1.82 for this gate, got 1.5",
        ),
        (torch.zeros(4, dtype=torch.int64), {"w_max": float("inf")}, r"w_max must be finite"),
        (torch.zeros(4, dtype=torch.int64), {"epsilon": 1.0}, r"epsilon must be within \(0, 1\), got 1.0"),
    ],
)
def test_impossible_wishes_are_refused(retained: torch.Tensor, options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gate_with_counts(small("kimi_k3"), retained, **{"w_max": 64.0, "a_s": 0.8, **options})


# Example gates


@pytest.mark.parametrize(("name", "median"), [("kimi-linear", 0.471), ("qwen3-next", 0.969), ("kimi-k3", 0.942)])
def test_example_gates_have_the_published_median_decay(name: str, median: float) -> None:
    geometry = GEOMETRIES[name]
    gate = example_gate(geometry, seed=3)
    alpha = one_step_decay(gate, FAMILIES[geometry.family].default_gate_input)
    assert alpha.median() == pytest.approx(median, abs=1e-3)
    assert alpha.std() > 0.05


def test_an_example_gate_of_kimi_linear_mixes_units_within_heads_about_as_published() -> None:
    geometry = GEOMETRIES["kimi-linear"]
    mask = select_units(static_horizons(example_gate(geometry), -0.3), 16.0)
    pairs = mixed_pairs(retained_fractions(mask, geometry))
    assert mask.double().mean() == pytest.approx(0.357, abs=0.03)
    assert pairs.mixed / 640 == pytest.approx(0.608, abs=0.06)
    assert pairs.omit_all > pairs.retain_all > 0


# Files


@pytest.mark.parametrize("shards", [1, 2, 6])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_written_checkpoint_is_read_back_as_it_was(family: str, shards: int, tmp_path: Path) -> None:
    geometry = small(family)
    gate = example_gate(geometry)
    write_checkpoint(tmp_path, family, gate, geometry, shards=shards, filler_bytes=1000)
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.family is FAMILIES[family]
    assert checkpoint.geometry == geometry
    assert checkpoint.gate.fingerprint() == gate.fingerprint()
    assert (tmp_path / "model.safetensors.index.json").exists() == (shards > 1)


@given(st.sampled_from(list(FAMILIES)), st.lists(st.booleans(), min_size=2, max_size=9).filter(any))
def test_any_layer_schedule_survives_the_family_s_own_form(
    tmp_path_factory: pytest.TempPathFactory, family: str, recurrent: list[bool]
) -> None:
    layers = tuple(block for block, is_recurrent in enumerate(recurrent) if is_recurrent)
    geometry = small(family, layers, len(recurrent))
    folder = tmp_path_factory.mktemp("schedule")
    assert read_checkpoint(write_checkpoint(folder, family, example_gate(geometry), geometry)).geometry == geometry


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "kimi_k3"])
def test_transformers_reads_the_written_config_alike(family: str, tmp_path: Path) -> None:
    geometry = small(family, (0, 1, 2, 4, 5), 6)
    write_checkpoint(tmp_path, family, example_gate(geometry), geometry)
    config = transformers.AutoConfig.from_pretrained(tmp_path).get_text_config()
    assert [block for block, name in enumerate(config.layer_types) if name == "linear_attention"] == [0, 1, 2, 4, 5]
    if geometry.kind == "kda":
        sizes = (config.linear_num_heads, config.linear_head_dim, config.linear_conv_kernel_dim)
        assert sizes == (geometry.num_value_heads, geometry.head_k_dim, geometry.conv_width)
    else:
        assert config.linear_num_value_heads == geometry.num_value_heads
        assert config.linear_key_head_dim == geometry.head_k_dim


def test_other_implementations_read_the_written_files(tmp_path: Path) -> None:
    geometry = small("kimi_k3")
    gate = example_gate(geometry)
    write_checkpoint(tmp_path, "kimi_k3", gate, geometry, filler_bytes=2**32, decay_dtype=torch.bfloat16)
    assert (tmp_path / "model.safetensors").stat().st_size > 2**32
    assert (tmp_path / "model.safetensors").stat().st_blocks * 512 < 2**20
    with safe_open(tmp_path / "model.safetensors", "pt") as stream:
        a_log = stream.get_tensor("language_model.model.layers.4.self_attn.A_log")
        dt_bias = stream.get_tensor("language_model.model.layers.4.self_attn.dt_bias")
    assert a_log.shape == (128,)
    assert torch.equal(a_log[:4], gate.A_log[3].bfloat16())
    assert torch.equal(dt_bias, gate.dt_bias[3].flatten().bfloat16())


def test_kimi_is_written_in_its_own_form(tmp_path: Path) -> None:
    geometry = small("kimi_linear")
    write_checkpoint(tmp_path, "kimi_linear", example_gate(geometry), geometry, quantization="mxfp4")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["linear_attn_config"]["kda_layers"] == [1, 2, 3, 5]
    assert config["linear_attn_config"]["full_attn_layers"] == [4, 6]
    with safe_open(tmp_path / "model.safetensors", "pt") as stream:
        assert stream.get_slice("model.layers.0.self_attn.A_log").get_shape() == [1, 1, 4, 1]
    assert read_checkpoint(tmp_path).quantization == "mxfp4"


def test_each_block_has_the_wanted_filler_tensors(tmp_path: Path) -> None:
    geometry = small("kimi_linear")
    options = {"filler_bytes": 6 * 3 * 16, "filler_tensors": 3}
    write_checkpoint(tmp_path, "kimi_linear", example_gate(geometry), geometry, **options)
    with safe_open(tmp_path / "model.safetensors", "pt") as stream:
        fillers = [name for name in stream.keys() if "expert" in name]  # noqa: SIM118 - not a dictionary
        assert {tuple(stream.get_slice(name).get_shape()) for name in fillers} == {(16,)}
    assert len(fillers) == 6 * 3


def test_only_its_own_folders_are_overwritten(tmp_path: Path) -> None:
    geometry = small("qwen3_next")
    gate = example_gate(geometry)
    write_checkpoint(tmp_path / "a", "qwen3_next", gate, geometry, shards=3)
    write_checkpoint(tmp_path / "a", "qwen3_next", gate, geometry)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["config.json", "model.safetensors"]
    with pytest.raises(ValueError, match=r"folder must be a folder, .*model.safetensors is a file"):
        write_checkpoint(tmp_path / "a" / "model.safetensors", "qwen3_next", gate, geometry)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text('{"model_type": "qwen3_next"}')
    with pytest.raises(ValueError, match=r"folder must be empty or written by write_checkpoint, .*b is neither"):
        write_checkpoint(tmp_path / "b", "qwen3_next", gate, geometry)
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["config.json"]


def test_what_a_family_cannot_express_is_refused(tmp_path: Path) -> None:
    safe, soft, gdn = small("kimi_k3"), small("kimi_linear"), small("qwen3_next")
    unequal = dataclasses.replace(soft, head_v_dim=32)
    cases = [
        ("kimi_linear", safe, {}, "cannot express kda with the safe gate and lower bound -5.0"),
        ("kimi_k3", soft, {}, "gate_lower_bound must be a finite number"),
        ("kimi_linear", gdn, {}, "equal key and value heads|cannot express gdn"),
        ("qwen3_next", soft, {}, "cannot express kda"),
        ("kimi_linear", unequal, {}, "must have equal key and value heads and dimensions, got 4 x 16 and 4 x 32"),
        ("kimi_linear", soft, {"shards": 7}, r"shards must be within \[1, 6\], got 7"),
        ("kimi_linear", soft, {"decay_dtype": torch.int8}, "decay_dtype must be one of .*, got torch.int8"),
        ("kimi_linear", soft, {"filler_bytes": -1}, "filler_bytes must not be negative, got -1"),
        ("kimi_linear", soft, {"filler_tensors": 0}, "filler_tensors must be at least 1, got 0"),
        ("gpt", soft, {}, "family must be one of"),
    ]
    for family, geometry, options, message in cases:
        with pytest.raises(ValueError, match=message):
            write_checkpoint(tmp_path, family, example_gate(geometry), geometry, **options)
    assert not any(tmp_path.iterdir())
