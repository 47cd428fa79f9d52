"""Weights permuted one by one, as a server loads them, are those that are permuted together."""

import pytest
import torch
from torch import Tensor

from dasc.geometry import StateGeometry
from dasc.models.families import FAMILIES
from dasc.models.hybrid import HybridConfig, permute_weights, random_hybrid
from dasc.placement import Placement, permute_heads
from dasc.sglang.permutation import HeadPermutation
from tests.masks import seeded_mask

GDN_LAYER, KDA_LAYER = "model.layers.0.linear_attn.", "model.layers.0.self_attn."


def model(kind: str) -> tuple[HybridConfig, dict[str, Tensor], Placement]:
    """A model and a placement that permutes its heads, two value heads a key head for GDN."""
    config, weights = random_hybrid(
        kind,
        seed=3,
        vocab_size=32,
        hidden_size=24,
        num_blocks=4,
        num_value_heads=8 if kind == "gdn" else 4,
        num_key_heads=4,
        head_v_dim=8,
        head_k_dim=4 if kind == "gdn" else 8,
        horizons_tokens=(2.0, 500.0),
    )
    return config, weights, shuffled(config.geometry)


def shuffled(geometry: StateGeometry) -> Placement:
    gen = torch.Generator().manual_seed(7)
    bundles = torch.stack([torch.randperm(geometry.num_key_heads, generator=gen) for _ in range(geometry.num_layers)])
    order = (bundles[:, :, None] * geometry.bundle + torch.arange(geometry.bundle)).flatten(1)
    return Placement.from_head_order(geometry, seeded_mask(geometry, 7), 2, "hybrid", order)


@pytest.mark.parametrize("prefix", ["", "model.language_model.", "language_model.model."])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_weights_one_by_one_are_those_permuted_together(kind: str, prefix: str):
    """Those of attention, experts and embeddings stay, under every name that a checkpoint may use."""
    config, weights, placement = model(kind)
    permutation = HeadPermutation(config.geometry, placement.head_order)
    expected = permute_weights(config, weights, placement)
    assert any(not torch.equal(expected[name], weights[name]) for name in weights)
    for name in reversed(weights):
        told = name.replace("model.", prefix, 1) if prefix else name
        assert torch.equal(permutation.permute(told, weights[name]), expected[name]), name
    permutation.check_complete()


def test_projections_that_are_apart_give_the_heads_that_fused_ones_give():
    """Qwen3.5's checkpoints against Qwen3-Next's: query, key, value, gate, b and a of each head lie elsewhere."""
    config, weights, placement = model("gdn")
    geometry = config.geometry
    permutation = HeadPermutation(geometry, placement.head_order)
    fused = {part: weights[f"{GDN_LAYER}{part}.weight"] for part in ("in_proj_qkvz", "in_proj_ba")}
    permuted = {part: permutation.permute(f"{GDN_LAYER}{part}.weight", weight) for part, weight in fused.items()}
    for part, weight in apart(geometry, **fused).items():
        found = permutation.permute(f"{GDN_LAYER}{part}.weight", weight)
        assert torch.equal(found, apart(geometry, **permuted)[part]), part


def apart(geometry: StateGeometry, in_proj_qkvz: Tensor, in_proj_ba: Tensor) -> dict[str, Tensor]:
    H, B, K, V = geometry.num_key_heads, geometry.bundle, geometry.head_k_dim, geometry.head_v_dim
    q, k, v, z = (part.flatten(0, 1) for part in in_proj_qkvz.unflatten(0, (H, -1)).split([K, K, B * V, B * V], dim=1))
    b, a = (part.flatten(0, 1) for part in in_proj_ba.unflatten(0, (H, -1)).split([B, B], dim=1))
    return {"in_proj_qkv": torch.cat([q, k, v]), "in_proj_z": z, "in_proj_b": b, "in_proj_a": a}


def test_of_an_A_log_longer_than_the_heads_only_the_first_are_permuted():
    config, _, placement = model("kda")
    order = placement.head_order[0]
    permutation = HeadPermutation(config.geometry, placement.head_order)
    longer = torch.randn(7)
    found = permutation.permute(KDA_LAYER + "A_log", longer)
    assert torch.equal(found[:4], longer[:4][order])
    assert torch.equal(found[4:], longer[4:])


def test_a_gate_of_full_rank_is_permuted_by_channels():
    """Kimi-K3's."""
    config, _, placement = model("kda")
    permutation = HeadPermutation(config.geometry, placement.head_order)
    gate = torch.randn(4 * 8, 24)
    found = permutation.permute(KDA_LAYER + "g_proj.weight", gate)
    assert torch.equal(found, permute_heads(gate, placement.head_order[0], 0, 8))


@pytest.mark.parametrize(
    ("part", "weight"),
    [
        ("q_proj.weight_packed", torch.zeros(32, 3, dtype=torch.int32)),
        ("q_proj.weight_scale", torch.zeros(32, 3)),
        ("q_proj.weight", torch.zeros(32, 24, dtype=torch.float8_e4m3fn)),
        ("o_norm.weight", torch.zeros(8, dtype=torch.int8)),
        ("q_proj.bias", torch.zeros(32)),
    ],
)
def test_packed_and_unknown_weights_are_refused_with_the_reason(part: str, weight: Tensor):
    config, _, placement = model("kda")
    permutation = HeadPermutation(config.geometry, placement.head_order)
    with pytest.raises(ValueError, match=rf"heads of {KDA_LAYER}{part} .*packed weights allow 'storage' only"):
        permutation.permute(KDA_LAYER + part, weight)


@pytest.mark.parametrize("name", ["model.layers.3.self_attn.q_proj.weight_packed", "mtp.layers.0.self_attn.q.weight"])
def test_what_has_no_recurrent_heads_may_be_anything(name: str):
    """The last block of the model has full attention."""
    config, _, placement = model("kda")
    assert 3 not in config.geometry.recurrent_layers
    weight = torch.zeros(2, dtype=torch.int32)
    assert HeadPermutation(config.geometry, placement.head_order).permute(name, weight) is weight


@pytest.mark.parametrize(
    ("left_out", "complaint"),
    [("A_log", "recurrent block 2 only .*b_proj"), ("", "recurrent block 0 only nothing came.*'storage' only")],
)
def test_weights_that_did_not_come_are_noticed(left_out: str, complaint: str):
    config, weights, placement = model("kda")
    permutation = HeadPermutation(config.geometry, placement.head_order)
    for name, weight in weights.items():
        if left_out and name != f"model.layers.2.self_attn.{left_out}":
            permutation.permute(name, weight)
    with pytest.raises(ValueError, match=complaint):
        permutation.check_complete()


def test_the_tensors_of_a_layer_are_told_by_name_in_every_family():
    for family in FAMILIES.values():
        name = f"{family.prefix}layers.12.{family.module}.out.weight"
        assert family.layer_tensor(name) == (12, "out.weight")
        assert family.layer_tensor(f"mtp.{name}") is None
        assert family.match(name) is None
