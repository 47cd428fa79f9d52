"""Configurations, weights and random models of the runnable hybrid; what is wrong with a folder is said in one line."""

import dataclasses
import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

import dasc.reference
from dasc.models import read_checkpoint
from dasc.models.hybrid import (
    Batch,
    GroupedAttentionConfig,
    HybridConfig,
    HybridModel,
    SequenceInput,
    config_json,
    load_hybrid,
    random_hybrid,
    read_config,
    save_hybrid,
)
from dasc.reference import static_horizons
from tests.models.hybrid_runs import KINDS, assert_close, isolated, random_tokens

SMALL = {"vocab_size": 97, "hidden_size": 16, "num_value_heads": 2, "head_v_dim": 8, "head_k_dim": 8, "num_blocks": 3}


@pytest.mark.parametrize("num_experts", [0, 4])
@pytest.mark.parametrize(("kind", "gate"), KINDS)
def test_a_random_model_is_the_same_after_saving_and_loading(kind: str, gate: str, num_experts: int, tmp_path: Path):
    config, weights = random_hybrid(kind, gate, **SMALL, num_experts=num_experts)
    save_hybrid(tmp_path / "new" / "folder", config, weights)
    loaded_config, loaded = load_hybrid(tmp_path / "new" / "folder")
    assert loaded_config == config
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    tokens = random_tokens(12, seed=0)
    models = [HybridModel(config, w, dasc.reference, dtype=torch.float64) for w in (weights, loaded)]
    first, second = (isolated(model, tokens)[0] for model in models)
    assert torch.equal(first, second)


@pytest.mark.parametrize(("kind", "gate"), KINDS)
def test_horizons_of_a_random_model_spread_over_the_range_asked_for_in_every_layer(
    kind: str, gate: str, tmp_path: Path
):
    bounds = (2.0, 3000.0)
    config, weights = random_hybrid(
        kind, gate, **{**SMALL, "num_value_heads": 16, "num_blocks": 6}, horizons_tokens=bounds
    )
    save_hybrid(tmp_path, config, weights)
    checkpoint = read_checkpoint(tmp_path)
    horizons = static_horizons(checkpoint.gate, checkpoint.family.default_gate_input)
    assert (checkpoint.geometry, checkpoint.gate.lower_bound) == (config.geometry, config.lower_bound)
    assert horizons.min() > 0.99 * bounds[0]
    assert horizons.max() < 1.01 * bounds[1]
    assert (horizons.amin(dim=1) < 30).all()
    assert (horizons.amax(dim=1) > 300).all()
    kept = (horizons > 64).double().mean(dim=1)
    assert kept.max() - kept.min() > 0.1  # layers differ, so that ragged storage gains


def test_seeds_give_different_models_and_one_seed_the_same():
    first, again, other = (random_hybrid(**SMALL, seed=seed)[1] for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_tied_embeddings_are_used_when_no_head_is_stored():
    config, weights = random_hybrid("kda", **SMALL)
    tied = read_config({**config_json(config), "tie_word_embeddings": True})
    embedding = weights["model.embed_tokens.weight"]
    headless = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
    tokens = random_tokens(5, seed=0)
    logits = [
        isolated(HybridModel(c, w, dasc.reference, dtype=torch.float64), tokens)[0]
        for c, w in ((tied, headless), (config, {**weights, "lm_head.weight": embedding}))
    ]
    assert torch.equal(*logits)


def test_older_and_official_forms_of_a_config_mean_the_same():
    qwen = config_json(random_hybrid("gdn", **SMALL, num_experts=4)[0])
    old = {k: v for k, v in qwen.items() if k not in ("rope_parameters", "layer_types")}
    old |= {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5, "rope_scaling": None, "full_attention_interval": 4}
    assert read_config(old).attention == read_config(qwen).attention
    assert read_config(old).experts == read_config(qwen).experts
    kimi = config_json(random_hybrid("kda", **SMALL, num_experts=4)[0])
    official = {k: v for k, v in kimi.items() if k != "mlp_layer_types"} | {"first_k_dense_replace": 1}
    assert read_config(official) == read_config(kimi)


def test_a_model_in_bf16_keeps_its_gates_in_fp32_and_reads_no_more_of_them_than_it_has_heads():
    """Fault 29. Kimi-K3 stores A_log longer than its heads."""
    config, weights = random_hybrid("kda", "safe", **SMALL)
    model = HybridModel(config, weights, dasc.reference, dtype=torch.bfloat16)
    mixer = model.blocks[0].mixer
    name = "language_model.model.layers.0.self_attn"
    assert len(weights[f"{name}.A_log"]) > 2
    assert torch.equal(mixer.A_log, weights[f"{name}.A_log"][:2])
    assert torch.equal(mixer.dt_bias.flatten(), weights[f"{name}.dt_bias"])
    states, kv = model.new_states(1), model.new_kv(4)
    logits = model.forward(Batch((SequenceInput(random_tokens(4, 0), 0, 0, torch.arange(4)),)), states, kv)
    assert logits.dtype == torch.bfloat16
    assert logits.isfinite().all()


def test_a_lower_bound_changes_the_answer_as_the_gate_says():
    """The safe gate is the model's own: the same weights with another bound forget at another rate."""
    config, weights = random_hybrid("kda", "safe", **SMALL)
    values = config_json(config)
    values["text_config"]["linear_attn_config"]["gate_lower_bound"] = -1.0
    tokens = random_tokens(20, seed=0)
    models = [HybridModel(c, weights, dasc.reference, dtype=torch.float64) for c in (config, read_config(values))]
    first, second = (isolated(model, tokens)[0] for model in models)
    assert (first - second).norm() > 1e-3 * first.norm()


def changed(kind: str, gate: str = "softplus", **changes: object) -> dict[str, object]:
    values = config_json(random_hybrid(kind, gate, **SMALL, num_experts=4)[0])
    return {**values, **changes}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (changed("gdn", model_type="llama"), "unknown model_type 'llama'"),
        (changed("gdn", model_type="qwen3_5"), "to be run, found 'qwen3_5'"),
        (changed("gdn", hidden_act="gelu"), "hidden_act must be 'silu', found 'gelu'"),
        (changed("gdn", rope_scaling={"type": "yarn"}), "rope_scaling must be null"),
        (changed("gdn", rope_parameters={"rope_type": "yarn"}), "rope_type must be 'default', found 'yarn'"),
        (changed("gdn", num_key_value_heads=3), "attention heads must be a multiple of 3 KV heads, got 2"),
        (changed("gdn", vocab_size=0), "vocab_size must be an integer of at least 1, found 0"),
        (changed("gdn", num_experts_per_tok=5), "experts of a token must be 1 to num_experts = 4, got 5"),
        (changed("kda", num_key_value_heads=1), "num_key_value_heads must be num_attention_heads = 2, found 1"),
        (changed("kda", mla_use_nope=False), "mla_use_nope must be true"),
        (changed("kda", moe_router_activation_func="softmax"), "moe_router_activation_func must be 'sigmoid'"),
        (changed("kda", num_expert_group=3), "expert groups must divide 4 experts"),
        (changed("kda", mlp_layer_types=["dense"]), "mlp_layer_types must be a list of 3 times"),
        (changed("kda", kv_lora_rank=None), "kv_lora_rank must be an integer of at least 1"),
    ],
)
def test_a_config_that_the_model_cannot_run_is_refused_by_key(values: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        read_config(values)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "gdn", "gate": "safe"}, "kind and gate must be"),
        ({"kind": "mamba"}, "kind and gate must be"),
        ({"head_k_dim": 8}, "KDA must have as many key as value heads and equal dimensions"),
        ({"num_key_heads": 2}, "KDA must have as many key as value heads and equal dimensions"),
        ({"horizons_tokens": (0.0, 5.0)}, "horizons_tokens must be ascending"),
        ({"horizons_tokens": (9.0, 5.0)}, "horizons_tokens must be ascending"),
        ({"gate": "safe", "horizons_tokens": (1.0, 5.0)}, "above 1.38"),
        ({"attention_period": 1}, "no recurrent layers"),
    ],
)
def test_a_random_model_that_cannot_be_is_refused(arguments: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        random_hybrid(**arguments)


def test_weights_missing_misshapen_or_left_over_are_named():
    config, weights = random_hybrid("kda", **SMALL)
    name = "model.layers.0.self_attn.b_proj.weight"
    without = {key: tensor for key, tensor in weights.items() if key != name}
    with pytest.raises(ValueError, match=f"weights must hold {name}, which is missing"):
        HybridModel(config, without, dasc.reference)
    with pytest.raises(ValueError, match=rf"{name} must be \[2, 16\], got \[16, 2\]"):
        HybridModel(config, {**weights, name: weights[name].T}, dasc.reference)
    with pytest.raises(ValueError, match="1 tensors that the configuration does not know, first mtp"):
        HybridModel(config, {**weights, "mtp": torch.zeros(1)}, dasc.reference)


def test_qwens_speculation_head_is_left_aside():
    config, weights = random_hybrid("gdn", **SMALL)
    HybridModel(config, {**weights, "mtp.layers.0.input_layernorm.weight": torch.zeros(16)}, dasc.reference)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_hybrid(tmp_path, *random_hybrid("kda", **SMALL))
    return tmp_path


def test_shards_are_joined_as_the_index_says(folder: Path):
    config, weights = load_hybrid(folder)
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        safetensors.torch.save_file({name: weights[name] for name in part}, folder / file)
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load_hybrid(folder)[0] == config
    assert all(torch.equal(load_hybrid(folder)[1][name], weights[name]) for name in names)


def test_a_damaged_folder_is_refused_in_one_line_that_names_the_file(folder: Path):
    def refused(message: str) -> None:
        with pytest.raises(ValueError, match=message) as caught:
            load_hybrid(folder)
        assert "\n" not in str(caught.value)

    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "../model.safetensors"}}))
    refused("weight_map must be an object of file names in the same folder")
    index.write_text(json.dumps({"weight_map": {"x": "model.safetensors"}}))
    refused("expected the tensor x, which the index places there")
    index.write_text(json.dumps({"weight_map": {"x": "lost.safetensors"}}))
    refused("lost.safetensors: cannot be read")
    index.unlink()
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    refused("model.safetensors: expected a safetensors file")
    (folder / "model.safetensors").unlink()
    refused("model.safetensors: cannot be read")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": {"quant_method": "fp8"}}))
    refused("weights must not be quantised to be run, found fp8")
    (folder / "config.json").write_text("{")
    refused("config.json: expected JSON")
    (folder / "config.json").unlink()
    refused("config.json: cannot be read: No such file or directory")


def test_a_model_that_the_familys_config_cannot_say_is_not_saved(tmp_path: Path):
    config, weights = random_hybrid("kda", **SMALL, num_experts=4)
    config = dataclasses.replace(config, experts=dataclasses.replace(config.experts, shared_size=17))
    with pytest.raises(ValueError, match="shared_size must be a multiple of size = 16 in Kimi, got 17"):
        save_hybrid(tmp_path / "new", config, weights)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lower_bound": -5.0}, "lower_bound must be given for kimi_k3 alone, got -5.0 for kimi_linear"),
        ({"expert_blocks": ()}, "experts must be given where blocks have them"),
        ({"attention": GroupedAttentionConfig(2, 2, 8, 4, 1e4)}, "attention must be LatentAttentionConfig for kda"),
        ({"allow_neg_eigval": True}, "allow_neg_eigval must be False but for olmo_hybrid, got True for kimi_linear"),
    ],
)
def test_a_configuration_of_parts_that_do_not_belong_together_is_refused(changes: dict[str, object], message: str):
    config, _ = random_hybrid("kda", **SMALL, num_experts=4)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **changes)


def test_reading_the_saved_model_twice_gives_close_answers_in_fp32_and_fp64(folder: Path):
    """FP64 is FP32 with more digits, not another model."""
    config, weights = load_hybrid(folder)
    tokens = random_tokens(30, seed=4)
    single, double = (HybridModel(config, weights, dasc.reference, dtype=d) for d in (torch.float32, torch.float64))
    assert_close(isolated(single, tokens)[0], isolated(double, tokens)[0], 1e-5)


def olmo(**changes: object) -> HybridConfig:
    return dataclasses.replace(random_hybrid("gdn", **SMALL, family="olmo_hybrid")[0], **changes)


def test_positions_of_olmo_hybrid_are_all_or_none_and_none_without_a_theta():
    plain = olmo()
    rotated = dataclasses.replace(plain.attention, rotary_dim=plain.attention.head_dim, rope_theta=500.0)
    for config in (plain, olmo(attention=rotated), olmo(allow_neg_eigval=False)):
        assert read_config(config_json(config)) == config
    values = config_json(plain)
    assert values["rope_parameters"] == {"rope_type": "default", "rope_theta": None}
    for missing in ({}, {"rope_parameters": None}, {"rope_theta": None}):
        older = {k: v for k, v in values.items() if k != "rope_parameters"} | missing
        assert read_config(older) == plain
    # negative eigenvalues are the rule
    assert read_config({k: v for k, v in values.items() if k != "linear_allow_neg_eigval"}) == plain
    with pytest.raises(ValueError, match="rope_type"):
        read_config({**values, "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0}})
    half = dataclasses.replace(plain.attention, rotary_dim=plain.attention.head_dim // 2)
    with pytest.raises(ValueError, match="rotary channels must be none or all 8 in OLMo-Hybrid, got 4"):
        config_json(olmo(attention=half))


def test_parts_of_one_gdn_family_do_not_fit_another():
    gated = random_hybrid("gdn", **SMALL, num_experts=4)[0]
    for changes, message in (
        ({"attention": gated.attention}, "attention must be gated for qwen3_next alone"),
        ({"experts": gated.experts, "expert_blocks": (1,)}, "experts must be None for olmo_hybrid"),
    ):
        with pytest.raises(ValueError, match=message):
            olmo(**changes)
    with pytest.raises(ValueError, match="attention must be gated for qwen3_next alone"):
        dataclasses.replace(gated, attention=olmo().attention)
    with pytest.raises(ValueError, match="family must be kimi_linear for kda with softplus, got 'olmo_hybrid'"):
        random_hybrid("kda", **SMALL, family="olmo_hybrid")
    with pytest.raises(ValueError, match="family must be qwen3_next or olmo_hybrid for gdn"):
        random_hybrid("gdn", **SMALL, family="kimi_linear")
