"""The compute permutation of ``hybrid`` placement leaves a model's function as it is, its states and masks permuted."""

import dataclasses
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

import dasc.reference
from dasc.geometry import DtypePolicy, StateGeometry
from dasc.layout import RaggedLayout, shard_mask
from dasc.models import read_checkpoint
from dasc.models.hybrid import Batch, HybridConfig, HybridModel, SequenceInput, permute_weights
from dasc.models.hybrid.files import save_hybrid
from dasc.placement import Placement, inverse_order, key_head_order, permute_heads
from tests.masks import seeded_mask
from tests.models.hybrid_runs import (
    F64,
    VOCAB,
    assert_close,
    conversations,
    isolated,
    nan_pools,
    random_of,
    random_tokens,
)

# (kind, gate, value heads, key heads): 1, 2 and 4 value heads a key head
MODELS = (
    ("gdn", "softplus", 4, 4),
    ("gdn", "softplus", 8, 4),
    ("gdn", "softplus", 16, 4),
    ("kda", "softplus", 4, 4),
    ("kda", "safe", 4, 4),
    ("olmo", "softplus", 8, 4),
)
ALL = pytest.mark.parametrize("model", MODELS, ids=lambda m: f"{m[0]} {m[1]} {m[2]}:{m[3]}")
EXACT = 1e-12


def build(model: tuple[str, str, int, int], **options) -> tuple[HybridConfig, dict[str, Tensor]]:
    """Weights are random, so each head's keys are its own."""
    kind, gate, value_heads, key_heads = model
    sizes = {"head_v_dim": 8, "head_k_dim": 8 if kind == "kda" else 4, "num_blocks": 5, "attention_period": 3}
    return random_of(
        kind,
        gate,
        seed=5,
        vocab_size=VOCAB,
        hidden_size=24,
        num_value_heads=value_heads,
        num_key_heads=key_heads,
        horizons_tokens=(2.0, 500.0),
        **{**sizes, **options},
    )


def shuffled(geometry: StateGeometry, seed: int = 0) -> Placement:
    """Bundles in another order in each layer."""
    gen = torch.Generator().manual_seed(seed)
    bundles = torch.stack([torch.randperm(geometry.num_key_heads, generator=gen) for _ in range(geometry.num_layers)])
    order = (bundles[:, :, None] * geometry.bundle + torch.arange(geometry.bundle)).flatten(1)
    return Placement.from_head_order(geometry, seeded_mask(geometry, seed), 2, "hybrid", order)


def permuted_mask(geometry: StateGeometry, mask: Tensor, placement: Placement) -> Tensor:
    return torch.cat(shard_mask(geometry, mask, placement.ranks, placement.head_order), dim=1)


def permuted_states(geometry: StateGeometry, temporal: Tensor, conv: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """``[L, N, HV, V, K]`` and ``[L, N, channels, width - 1]`` with the heads of each layer in their order."""
    key_order = key_head_order(order, geometry)
    rows = []
    for layer in range(geometry.num_layers):
        q, k, v = conv[layer].split_with_sizes(geometry.conv_segments, dim=1)
        rows.append(
            torch.cat(
                [
                    permute_heads(q, key_order[layer], 1, geometry.head_k_dim),
                    permute_heads(k, key_order[layer], 1, geometry.head_k_dim),
                    permute_heads(v, order[layer], 1, geometry.head_v_dim),
                ],
                dim=1,
            )
        )
    return torch.stack([permute_heads(t, o, 1) for t, o in zip(temporal, order)]), torch.stack(rows)


def both(
    model: tuple[str, str, int, int], placement: Placement | None = None
) -> tuple[HybridModel, HybridModel, Placement]:
    config, weights = build(model)
    placement = placement or shuffled(config.geometry)
    assert placement.permutes_heads
    plain, permuted = (
        HybridModel(config, w, dasc.reference, dtype=torch.float64)
        for w in (weights, permute_weights(config, weights, placement))
    )
    return plain, permuted, placement


@ALL
def test_prefill_decode_and_states_are_the_same_up_to_the_order_of_heads(model):
    """Fault 27: in FP64, two sequences by pieces of several tokens and of one."""
    plain, permuted, placement = both(model)
    states, logits = [], []
    for candidate in (plain, permuted):
        pools, kv = nan_pools(candidate)
        runs = conversations([70, 9])
        seen = []
        for sizes in ((66, 5), (1, 1), (1, 1), (2, 2)):
            batch = Batch(tuple(run.next(size) for run, size in zip(runs, sizes)))
            seen.append(candidate.forward(batch, pools, kv, all_tokens=True))
        logits.append(torch.cat(seen))
        states.append((pools.temporal[:, 1:3], pools.conv[:, 1:3]))
    assert_close(logits[1], logits[0], EXACT)
    expected = permuted_states(plain.config.geometry, *states[0], placement.head_order)
    for got, part in zip(states[1], expected, strict=True):
        assert_close(got, part, EXACT)
    assert not torch.allclose(states[1][0], states[0][0])  # an order that changes nothing would show nothing


@ALL
@pytest.mark.parametrize("refreshed", [False, True], ids=["NR", "WR"])
def test_compressed_checkpoints_by_the_permuted_mask_give_the_same_logits(model, refreshed: bool):
    """Omitted units zero-filled (NR) or refreshed from a window (WR), within the prefill of what follows."""
    plain, permuted, placement = both(model)
    geometry = plain.config.geometry
    mask = seeded_mask(geometry, 3, 0.4)
    tokens = random_tokens(40, seed=1)
    logits = []
    for candidate, own in ((plain, mask), (permuted, permuted_mask(geometry, mask, placement))):
        pools, kv = nan_pools(candidate, 2, 40)
        candidate.forward(Batch((SequenceInput(tokens[:30], 0, 0, torch.arange(30)),)), pools, kv)
        layout = RaggedLayout.from_mask(geometry, own, F64)
        loaded = dasc.reference.unpack(dasc.reference.pack(pools.temporal[:, :1], pools.conv[:, :1], layout), layout)
        pools.temporal[:, 1:], pools.conv[:, 1:] = loaded
        window = tokens[22:30] if refreshed else None
        rest = SequenceInput(tokens[30:], 30, 1, torch.arange(40), window=window)
        logits.append(candidate.forward(Batch((rest,), global_units=own), pools, kv, all_tokens=True))
    assert_close(logits[1], logits[0], EXACT)
    dense = isolated(plain, tokens)[0][30:]
    assert (logits[0] - dense).norm() > 1e-6 * dense.norm()  # the mask omits something that counts


@ALL
def test_horizons_and_so_the_mask_of_the_permuted_model_are_the_permuted_ones(model, tmp_path: Path):
    config, weights = build(model)
    placement = shuffled(config.geometry)
    masks = []
    for folder, own in (
        (tmp_path / "plain", weights),
        (tmp_path / "moved", permute_weights(config, weights, placement)),
    ):
        save_hybrid(folder, config, own)
        checkpoint = read_checkpoint(folder)
        horizons = dasc.reference.static_horizons(checkpoint.gate, checkpoint.family.default_gate_input)
        masks.append(dasc.reference.select_units(horizons, 16))
    assert torch.equal(masks[1], permuted_mask(config.geometry, masks[0], placement))
    assert not torch.equal(masks[1], masks[0])


@pytest.mark.parametrize("model", [m for m in MODELS if m[1] == "softplus"], ids=str)
def test_transformers_finds_the_same_function_in_the_permuted_weights(model, tmp_path: Path):
    transformers.logging.set_verbosity_error()
    config, weights = build(model, num_experts=2)
    save_hybrid(tmp_path, config, permute_weights(config, weights, shuffled(config.geometry)))
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = random_tokens(20, seed=0)
    with torch.no_grad():
        found = peer(tokens[None]).logits[0]
    plain = HybridModel(config, weights, dasc.reference)
    assert_close(found, isolated(plain, tokens, DtypePolicy(conv=torch.float32))[0], 1e-4)


@ALL
def test_the_placement_of_a_mask_gives_each_rank_its_heads_as_a_contiguous_block(model):
    config, weights = build(model)
    geometry = config.geometry
    mask = seeded_mask(geometry, 2, 0.3)
    placement = dasc.reference.place(geometry, mask, 2, "hybrid")
    permuted = permute_weights(config, weights, placement)
    names = sorted(name for name in weights if name.endswith("A_log"))
    for layer, name in enumerate(names):
        ours, theirs = permuted[name].flatten(), weights[name].flatten()
        assert torch.equal(ours[: geometry.num_value_heads], theirs[placement.head_order[layer]])
        for rank in range(2):
            block = slice(rank * geometry.num_value_heads // 2, (rank + 1) * geometry.num_value_heads // 2)
            assert torch.equal(ours[block], theirs[placement.rank_heads(rank)[layer]])


@ALL
def test_permuting_moves_entries_only_and_the_inverse_order_brings_them_back(model):
    """What heads share is not even copied, and the given weights stay as they are."""
    config, weights = build(model)
    before = {name: tensor.clone() for name, tensor in weights.items()}
    placement = shuffled(config.geometry)
    permuted = permute_weights(config, weights, placement)
    assert permuted.keys() == weights.keys()
    moved = {name for name in weights if permuted[name] is not weights[name]}
    assert len(moved) == config.geometry.num_layers * (6 if config.geometry.family == "qwen3_next" else 12)
    assert not any(shared in name for name in moved for shared in ("norm", "f_a_proj", "g_a_proj"))
    for name in moved:
        assert permuted[name].shape == weights[name].shape
        assert torch.equal(permuted[name].flatten().sort().values, weights[name].flatten().sort().values)
    back = dataclasses.replace(placement, head_order=inverse_order(placement.head_order))
    again = permute_weights(config, permuted, back)
    for name, tensor in before.items():
        assert torch.equal(weights[name], tensor)
        assert torch.equal(again[name], tensor)


def test_of_a_longer_a_log_only_the_entries_of_heads_move():
    """Kimi-K3 stores 128 for however many heads."""
    config, weights = build(("kda", "safe", 4, 4))
    placement = shuffled(config.geometry)
    name = "language_model.model.layers.0.self_attn.A_log"
    assert weights[name].shape == (128,)
    weights[name] = torch.arange(128.0)
    permuted = permute_weights(config, weights, placement)[name]
    assert permuted[:4].tolist() == placement.head_order[0].tolist()
    assert permuted[4:].tolist() == list(range(4, 128))


@pytest.mark.parametrize("mode", ["off", "storage"])
def test_other_placements_change_nothing_and_allow_packed_weights(mode):
    config, weights = build(MODELS[0])
    weights["model.layers.0.linear_attn.in_proj_qkvz.weight_packed"] = torch.zeros(2, dtype=torch.int32)
    placement = dasc.reference.place(config.geometry, seeded_mask(config.geometry, 0), 2, mode)
    permuted = permute_weights(config, weights, placement)
    assert permuted.keys() == weights.keys()
    assert all(permuted[name] is weights[name] for name in weights)


IN = "model.layers.0.linear_attn.in_proj_qkvz.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({IN + "_packed": torch.zeros(2, dtype=torch.int32)}, r"weight_packed \(torch.int32\).* 'storage' only"),
        ({IN + "_scale_inv": torch.zeros(2)}, "weight_scale_inv .* quantised and packed weights allow 'storage' only"),
        ({IN: torch.zeros(96, 24, dtype=torch.uint8)}, r"in_proj_qkvz.weight \(torch.uint8\).* 'storage' only"),
        ({IN: torch.zeros(96, 24).to(torch.float8_e4m3fn)}, r"float8_e4m3fn.* 'storage' only"),
        ({IN: None}, "weights must hold model.layers.0.linear_attn.in_proj_qkvz.weight, which is missing"),
        ({IN: torch.zeros(28, 24)}, r"must hold 96 entries of heads in axis 0, got \[28, 24\]"),
        ({IN: torch.zeros(160, 24)}, r"must hold 96 entries of heads in axis 0, got \[160, 24\]"),
        ({"model.layers.0.linear_attn.out_proj.weight": torch.zeros(24)}, "must hold 32 entries of heads in axis 1"),
    ],
    ids=["packed", "scales", "integers", "float8", "missing", "too short", "too long", "no such axis"],
)
def test_weights_whose_heads_cannot_be_permuted_are_refused_with_the_reason(change, message: str):
    """Packed weights have no rows to take; a scale or an unknown tensor may be coupled to heads."""
    config, weights = build(MODELS[0])
    weights = {name: tensor for name, tensor in (weights | change).items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        permute_weights(config, weights, shuffled(config.geometry))


def test_orders_of_another_model_or_through_bundles_are_refused():
    """Fault 27: heads that share a key head stay together."""
    config, weights = build(MODELS[1])
    placement = shuffled(config.geometry)
    apart = placement.head_order[:, [0, 2, 1, 3, 4, 5, 6, 7]]
    with pytest.raises(ValueError, match="keep the heads that share a key head"):
        permute_weights(config, weights, dataclasses.replace(placement, head_order=apart))
    with pytest.raises(ValueError, match=r"head_order must be torch.int64 \(4, 8\)"):
        permute_weights(config, weights, dataclasses.replace(placement, head_order=placement.head_order[1:]))
