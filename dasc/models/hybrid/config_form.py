"""A runnable hybrid model's configuration, read from and written as the config.json of its family."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dasc.models.config import Config
from dasc.models.families import family_of_config
from dasc.models.families.config_forms import gdn_keys, kda_keys
from dasc.models.hybrid.attention import AttentionConfig, GroupedAttentionConfig, LatentAttentionConfig
from dasc.models.hybrid.config import RUNNABLE_FAMILIES, HybridConfig
from dasc.models.hybrid.feed_forward import ExpertsConfig

_NEG_EIGVAL = "linear_allow_neg_eigval"
# of a configuration that rotates nothing
_ANY_THETA = 10_000.0


def read_config(values: Mapping[str, object], where: str = "config.json") -> HybridConfig:
    """The model that a config.json describes.

    Args:
        values: the parsed JSON object.
        where: the file, for messages.

    Raises:
        ValueError: for another family, a key that is missing or wrong, or a variant that the model does not have.
    """
    top = Config(values, where)
    family = family_of_config(top)
    config = top.section("text_config") or top
    geometry, lower_bound = family.geometry(config), family.lower_bound(config)
    if geometry.family not in RUNNABLE_FAMILIES:
        raise top.error("model_type", f"one of {', '.join(RUNNABLE_FAMILIES)} to be run")
    if config.has("hidden_act") and config.text("hidden_act") != "silu":
        raise config.error("hidden_act", "'silu'")
    olmo = geometry.family == "olmo_hybrid"
    experts, expert_blocks = (None, ()) if olmo else _EXPERTS[geometry.kind](config, geometry.num_blocks)
    return HybridConfig(
        geometry=geometry,
        lower_bound=lower_bound,
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        norm_eps=config.number("rms_norm_eps"),
        tied_embeddings=_flag_or_false(config, "tie_word_embeddings"),
        attention=_ATTENTION[geometry.family](config),
        mlp_size=config.integer("intermediate_size"),
        experts=experts if expert_blocks else None,
        expert_blocks=expert_blocks,
        allow_neg_eigval=olmo and (not config.has(_NEG_EIGVAL) or config.flag(_NEG_EIGVAL)),
    )


def _flag_or_false(config: Config, key: str) -> bool:
    return config.has(key) and config.flag(key)


def _rope(config: Config) -> Config:
    """Where rotary parameters stand: in ``rope_parameters``, in older files beside the rest."""
    rope = config.section("rope_parameters") or config
    if rope.has("rope_type") and rope.text("rope_type") != "default":
        raise rope.error("rope_type", "'default'")
    if config.has("rope_scaling"):
        raise config.error("rope_scaling", "null")
    return rope


def _qwen_attention(config: Config) -> GroupedAttentionConfig:
    rope = _rope(config)
    head_dim = config.integer("head_dim")
    return GroupedAttentionConfig(
        num_heads=config.integer("num_attention_heads"),
        num_kv_heads=config.integer("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=int(head_dim * rope.number("partial_rotary_factor")),
        rope_theta=rope.number("rope_theta"),
        bias=_flag_or_false(config, "attention_bias"),
    )


def _olmo_attention(config: Config) -> GroupedAttentionConfig:
    """Without a ``rope_theta``, as released, there are no positions; with it all channels of a head are rotated."""
    num_heads = config.integer("num_attention_heads")
    head_dim = config.integer_or("head_dim", config.integer("hidden_size") // num_heads)
    rope = _rope(config)
    rotated = rope.has("rope_theta")
    return GroupedAttentionConfig(
        num_heads=num_heads,
        num_kv_heads=config.integer_or("num_key_value_heads", num_heads),
        head_dim=head_dim,
        rotary_dim=head_dim if rotated else 0,
        rope_theta=rope.number("rope_theta") if rotated else _ANY_THETA,
        bias=_flag_or_false(config, "attention_bias"),
        gated=False,
    )


def _kimi_attention(config: Config) -> LatentAttentionConfig:
    num_heads = config.integer("num_attention_heads")
    if config.integer_or("num_key_value_heads", num_heads) != num_heads:
        raise config.error("num_key_value_heads", f"num_attention_heads = {num_heads}")
    if config.has("mla_use_nope") and not config.flag("mla_use_nope"):
        raise config.error("mla_use_nope", "true")
    return LatentAttentionConfig(
        num_heads=num_heads,
        kv_rank=config.integer("kv_lora_rank"),
        q_rank=config.integer("q_lora_rank") if config.has("q_lora_rank") else None,
        qk_nope_dim=config.integer("qk_nope_head_dim"),
        qk_rope_dim=config.integer("qk_rope_head_dim"),
        v_dim=config.integer("v_head_dim"),
        bias=_flag_or_false(config, "attention_bias"),
    )


def _qwen_experts(config: Config, num_blocks: int) -> tuple[ExpertsConfig | None, tuple[int, ...]]:
    num_experts = config.integer("num_experts", minimum=0)
    if num_experts == 0:
        return None, ()
    dense = set(config.integers("mlp_only_layers")) if config.has("mlp_only_layers") else set()
    step = config.integer_or("decoder_sparse_step", 1)
    experts = ExpertsConfig(
        router="softmax",
        num_experts=num_experts,
        top_k=config.integer("num_experts_per_tok"),
        size=config.integer("moe_intermediate_size"),
        shared_size=config.integer("shared_expert_intermediate_size"),
        normalize=config.flag("norm_topk_prob"),
    )
    return experts, tuple(b for b in range(num_blocks) if b not in dense and (b + 1) % step == 0)


def _kimi_experts(config: Config, num_blocks: int) -> tuple[ExpertsConfig | None, tuple[int, ...]]:
    """Blocks with experts are listed in ``mlp_layer_types``, or are all from ``first_k_dense_replace`` on."""
    if config.has("mlp_layer_types"):
        types = config.strings("mlp_layer_types")
        if len(types) != num_blocks or not set(types) <= {"dense", "sparse"}:
            raise config.error("mlp_layer_types", f"a list of {num_blocks} times 'dense' or 'sparse'")
        blocks = tuple(b for b, name in enumerate(types) if name == "sparse")
    else:
        blocks = tuple(range(config.integer_or("first_k_dense_replace", 1, minimum=0), num_blocks))
    if not blocks:
        return None, ()
    if config.integer_or("moe_layer_freq", 1) != 1:
        raise config.error("moe_layer_freq", "1")
    if config.has("moe_router_activation_func") and config.text("moe_router_activation_func") != "sigmoid":
        raise config.error("moe_router_activation_func", "'sigmoid'")
    size = config.integer("moe_intermediate_size")
    experts = ExpertsConfig(
        router="sigmoid",
        num_experts=config.integer("num_experts"),
        top_k=config.integer("num_experts_per_token"),
        size=size,
        shared_size=size * config.integer("num_shared_experts"),
        normalize=config.flag("moe_renormalize"),
        scale=config.number("routed_scaling_factor"),
        groups=config.integer_or("num_expert_group", 1),
        top_groups=config.integer_or("topk_group", 1),
    )
    return experts, blocks


_ATTENTION: dict[str, Callable[[Config], AttentionConfig]] = {
    "qwen3_next": _qwen_attention,
    "olmo_hybrid": _olmo_attention,
    "kimi_linear": _kimi_attention,
    "kimi_k3": _kimi_attention,
}
_EXPERTS = {"gdn": _qwen_experts, "kda": _kimi_experts}


def config_json(config: HybridConfig) -> dict[str, object]:
    """A config.json that :func:`read_config` reads back equal, in the form of the model's family.

    Raises:
        ValueError: for sizes that the family's form cannot say.
    """
    common: dict[str, object] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.mlp_size,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings,
        "hidden_act": "silu",
        "num_attention_heads": config.attention.num_heads,
        "attention_bias": config.attention.bias,
        # the families' classes have defaults that a small vocabulary does not reach
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if config.geometry.family == "qwen3_next":
        text = {**common, **gdn_keys(config.geometry), **_qwen_keys(config)}
        return {"model_type": "qwen3_next", "architectures": ["Qwen3NextForCausalLM"], **text}
    if config.geometry.family == "olmo_hybrid":
        text = {**common, **gdn_keys(config.geometry), **_olmo_keys(config)}
        return {"model_type": "olmo_hybrid", "architectures": ["OlmoHybridForCausalLM"], **text}
    text = {**common, **kda_keys(config.geometry, first_block=1), **_kimi_keys(config)}
    if config.lower_bound is None:
        return {"model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"], **text}
    linear = text["linear_attn_config"]
    assert isinstance(linear, dict)
    linear["gate_lower_bound"] = config.lower_bound
    return {"model_type": "kimi_k3", "text_config": {"model_type": "kimi_linear", **text}}


def _qwen_keys(config: HybridConfig) -> dict[str, object]:
    attention, experts = config.attention, config.experts
    assert isinstance(attention, GroupedAttentionConfig)
    keys: dict[str, object] = {
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": attention.rope_theta,
            "partial_rotary_factor": attention.rotary_dim / attention.head_dim,
        },
        "num_experts": 0,
    }
    if experts is None:
        return keys
    return keys | {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "moe_intermediate_size": experts.size,
        "shared_expert_intermediate_size": experts.shared_size,
        "norm_topk_prob": experts.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [b for b in range(config.geometry.num_blocks) if b not in config.expert_blocks],
    }


def _olmo_keys(config: HybridConfig) -> dict[str, object]:
    attention = config.attention
    assert isinstance(attention, GroupedAttentionConfig)
    if attention.rotary_dim not in (0, attention.head_dim):
        raise ValueError(
            f"rotary channels must be none or all {attention.head_dim} in OLMo-Hybrid, got {attention.rotary_dim}"
        )
    return {
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        # null in place of all parameters would mean the default ones to transformers
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": attention.rope_theta if attention.rotary_dim else None,
        },
        _NEG_EIGVAL: config.allow_neg_eigval,
    }


def _kimi_keys(config: HybridConfig) -> dict[str, object]:
    attention, experts = config.attention, config.experts
    assert isinstance(attention, LatentAttentionConfig)
    sparse = set(config.expert_blocks)
    keys: dict[str, object] = {
        "num_key_value_heads": attention.num_heads,
        "kv_lora_rank": attention.kv_rank,
        "q_lora_rank": attention.q_rank,
        "qk_nope_head_dim": attention.qk_nope_dim,
        "qk_rope_head_dim": attention.qk_rope_dim,
        "v_head_dim": attention.v_dim,
        "mlp_layer_types": ["sparse" if b in sparse else "dense" for b in range(config.geometry.num_blocks)],
    }
    if experts is None:
        return keys
    if experts.shared_size % experts.size:
        raise ValueError(f"shared_size must be a multiple of size = {experts.size} in Kimi, got {experts.shared_size}")
    return keys | {
        "num_experts": experts.num_experts,
        "num_experts_per_token": experts.top_k,
        "moe_intermediate_size": experts.size,
        "num_shared_experts": experts.shared_size // experts.size,
        "moe_renormalize": experts.normalize,
        "moe_router_activation_func": "sigmoid",
        "routed_scaling_factor": experts.scale,
        "num_expert_group": experts.groups,
        "topk_group": experts.top_groups,
    }
