"""The model against transformers on files that transformers wrote, and transformers on files that dasc wrote."""

import logging
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

import dasc.reference
from dasc.geometry import DtypePolicy
from dasc.models import read_checkpoint
from dasc.models.hybrid import Batch, HybridModel, SequenceInput, load_hybrid, random_hybrid, save_hybrid
from tests.models.hybrid_runs import assert_close

logging.getLogger("transformers").setLevel(logging.ERROR)
VOCAB = 60
F32 = DtypePolicy(temporal=torch.float32, conv=torch.float32)

QWEN = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [0],
}
# transformers saves the taps of queries, keys and values in three equal parts, so there must be as many of each
OLMO = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
NO_POSITIONS = {"rope_type": "default", "rope_theta": None}
KIMI = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "linear_head_dim": 8,
    "linear_num_heads": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "qwen": transformers.Qwen3NextConfig,
    "olmo": transformers.OlmoHybridConfig,
    "kimi": transformers.KimiLinearConfig,
}
CASES = {
    "qwen": (QWEN, {}),
    "qwen tied": (QWEN, {"tie_word_embeddings": True}),
    "qwen dense, four value heads a key head": (QWEN, {"num_experts": 0, "linear_num_key_heads": 1}),
    "qwen biased, shared weights, other rotation": (
        QWEN,
        {
            "attention_bias": True,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "linear_conv_kernel_dim": 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
        },
    ),
    "olmo": (OLMO, {"rope_parameters": NO_POSITIONS}),
    "olmo tied": (OLMO, {"tie_word_embeddings": True}),
    "olmo rotated, biased, three recurrent layers": (
        OLMO,
        {
            "attention_bias": True,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "olmo without negative eigenvalues, every head its own keys": (
        OLMO,
        {
            "linear_allow_neg_eigval": False,
            "linear_num_key_heads": 4,
            "linear_value_head_dim": 8,
            "num_key_value_heads": None,
            "head_dim": 6,
            "rope_parameters": NO_POSITIONS,
        },
    ),
    "kimi": (KIMI, {}),
    "kimi tied": (KIMI, {"tie_word_embeddings": True}),
    "kimi dense": (KIMI, {"mlp_layer_types": ["dense"] * 4}),
    "kimi groups of experts, query latent, biased": (
        KIMI,
        {
            "num_local_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "q_lora_rank": 10,
            "attention_bias": True,
        },
    ),
}


def build_peer(case: str) -> transformers.PreTrainedModel:
    """Weights far from their initial values, or most of the model would hardly show in the logits."""
    base, changes = CASES[case]
    torch.manual_seed(0)
    config_class = CONFIGS[case.split()[0]]
    peer = transformers.AutoModelForCausalLM.from_config(config_class(**{**base, **changes})).eval()
    with torch.no_grad():
        for tensor in [*peer.parameters(), *peer.buffers()]:
            tensor += 0.15 * torch.randn_like(tensor)
    return peer


def random_ids(length: int) -> Tensor:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(length))


def run(model: HybridModel, ids: Tensor, pieces: list[int]) -> Tensor:
    """Logits of all tokens, the prompt given in pieces."""
    states, kv = model.new_states(1, F32), model.new_kv(len(ids))
    logits, start = [], 0
    for size in pieces:
        end = start + size
        batch = Batch((SequenceInput(ids[start:end], start, 0, torch.arange(end)),))
        logits.append(model.forward(batch, states, kv, all_tokens=True))
        start = end
    return torch.cat(logits)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_transformers_on_the_files_it_wrote(case: str, tmp_path: Path):
    peer = build_peer(case)
    shards = "40KB" if "tied" in case else "1GB"
    peer.save_pretrained(tmp_path, max_shard_size=shards)
    assert (tmp_path / "model.safetensors.index.json").exists() == ("tied" in case)
    config, weights = load_hybrid(tmp_path)
    model = HybridModel(config, weights, dasc.reference)
    ids = random_ids(80)
    with torch.no_grad():
        expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)(ids[None]).logits[0]
    assert_close(run(model, ids, [80]), expected, 1e-4)
    assert_close(run(model, ids, [1, 2, 66, *[1] * 11]), expected, 1e-4)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("gdn", {"num_experts": 3}), ("gdn", {"family": "olmo_hybrid"}), ("kda", {"num_experts": 3})],
    ids=["qwen", "olmo", "kimi"],
)
def test_transformers_runs_a_random_model_that_dasc_saved(kind: str, options: dict, tmp_path: Path):
    config, weights = random_hybrid(kind, seed=1, vocab_size=VOCAB, hidden_size=32, **options)
    save_hybrid(tmp_path, config, weights)
    peer, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    ids = random_ids(40)
    with torch.no_grad():
        expected = peer(ids[None]).logits[0]
    assert_close(run(HybridModel(config, weights, dasc.reference), ids, [40]), expected, 1e-4)


@pytest.mark.parametrize("case", ["qwen", "olmo", "kimi"])
def test_geometry_is_the_one_that_the_checkpoint_reader_finds(case: str, tmp_path: Path):
    build_peer(case).save_pretrained(tmp_path)
    assert load_hybrid(tmp_path)[0].geometry == read_checkpoint(tmp_path).geometry
