"""Small random hybrid models, for demonstrations and tests where no trained one is at hand."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from dasc.geometry import Kind, StateGeometry
from dasc.models.families import family_of_name
from dasc.models.gate_parameters import GateKind
from dasc.models.hybrid.attention import AttentionConfig, GroupedAttentionConfig, LatentAttentionConfig
from dasc.models.hybrid.config import HybridConfig
from dasc.models.hybrid.feed_forward import ExpertsConfig
from dasc.models.hybrid.model import read_layers
from dasc.models.hybrid.weights import WeightReader

LOWER_BOUND = -5.0
EPSILON = 1e-3
_FAMILIES: dict[tuple[Kind, GateKind], tuple[str, ...]] = {
    ("gdn", "softplus"): ("qwen3_next", "olmo_hybrid"),
    ("kda", "softplus"): ("kimi_linear",),
    ("kda", "safe"): ("kimi_k3",),
}


def random_hybrid(
    kind: Kind = "kda",
    gate: GateKind = "softplus",
    *,
    seed: int = 0,
    vocab_size: int = 256,
    hidden_size: int = 64,
    num_blocks: int = 4,
    attention_period: int = 4,
    num_value_heads: int = 4,
    num_key_heads: int | None = None,
    head_v_dim: int = 16,
    head_k_dim: int = 16,
    num_experts: int = 0,
    horizons_tokens: tuple[float, float] = (2.0, 4096.0),
    family: str | None = None,
) -> tuple[HybridConfig, dict[str, Tensor]]:
    """A model of random weights whose units forget at widely different rates, and in each layer differently.

    Args:
        kind: ``"gdn"`` makes a ``qwen3_next`` or, if asked for by ``family``, an ``olmo_hybrid``; ``"kda"`` a
            ``kimi_linear``.
        gate: ``"safe"`` makes a ``kimi_k3`` with the lower bound -5.
        seed: of everything random.
        vocab_size: token ids are below it.
        hidden_size: width of the residual stream.
        num_blocks: recurrent and attention blocks together.
        attention_period: every ``attention_period``-th block has full attention.
        num_value_heads: recurrent value heads, and attention heads.
        num_key_heads: recurrent key heads; as many as value heads when ``None``.
        head_v_dim: recurrent value channels of a head; attention heads are of this size too.
        head_k_dim: recurrent key channels of a head.
        num_experts: experts of every block but the first, two of them a token; 0 for dense MLPs.
        horizons_tokens: shortest and longest retention horizon (eq. 3) at the family's representative gate input.
        family: of the model, where kind and gate leave a choice; the one named first there when ``None``.

    Returns:
        Configuration and FP32 weights, for :class:`~dasc.models.hybrid.model.HybridModel` or
        :func:`~dasc.models.hybrid.files.save_hybrid`.

    Raises:
        ValueError: for sizes or a gate that no family has.
    """
    if (kind, gate) not in _FAMILIES:
        raise ValueError(
            f"kind and gate must be gdn with softplus, or kda with softplus or safe, got {kind} with {gate}"
        )
    families = _FAMILIES[kind, gate]
    if family is not None and family not in families:
        raise ValueError(f"family must be {' or '.join(families)} for {kind} with {gate}, got {family!r}")
    shortest, longest = horizons_tokens
    least = math.log(EPSILON) / LOWER_BOUND if gate == "safe" else 0.0
    if not least < shortest <= longest < math.inf:
        raise ValueError(f"horizons_tokens must be ascending, finite and above {least:.2f}, got {horizons_tokens}")
    geometry = StateGeometry(
        family=family or families[0],
        kind=kind,
        num_blocks=num_blocks,
        recurrent_layers=tuple(block for block in range(num_blocks) if (block + 1) % attention_period),
        num_value_heads=num_value_heads,
        num_key_heads=num_value_heads if num_key_heads is None else num_key_heads,
        head_v_dim=head_v_dim,
        head_k_dim=head_k_dim,
    )
    experts = None
    if num_experts:
        router: Literal["softmax", "sigmoid"] = "softmax" if kind == "gdn" else "sigmoid"
        experts = ExpertsConfig(router, num_experts, min(2, num_experts), hidden_size, hidden_size, normalize=True)
    config = HybridConfig(
        geometry=geometry,
        lower_bound=LOWER_BOUND if gate == "safe" else None,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        norm_eps=1e-6,
        tied_embeddings=False,
        attention=_attention(geometry),
        mlp_size=2 * hidden_size,
        experts=experts,
        expert_blocks=tuple(range(1, num_blocks)) if experts else (),
        allow_neg_eigval=geometry.family == "olmo_hybrid",
    )
    generator = torch.Generator().manual_seed(seed)
    drawn = _DrawnWeights(config, generator)
    read_layers(config, drawn)
    return config, drawn.tensors | _decay_weights(config, generator, horizons_tokens)


def _attention(geometry: StateGeometry) -> AttentionConfig:
    heads, dim = geometry.num_value_heads, geometry.head_v_dim
    if geometry.kind == "gdn":
        gated = geometry.family == "qwen3_next"
        rotary_dim = dim // 2 if gated else 0
        return GroupedAttentionConfig(heads, geometry.num_key_heads, dim, rotary_dim, rope_theta=10_000.0, gated=gated)
    return LatentAttentionConfig(heads, kv_rank=2 * dim, q_rank=None, qk_nope_dim=dim, qk_rope_dim=dim // 2, v_dim=dim)


class _DrawnWeights(WeightReader):
    """Answers every request for a weight with a random one of that shape, and keeps it."""

    def __init__(self, config: HybridConfig, generator: torch.Generator) -> None:
        super().__init__({}, torch.float32, torch.device("cpu"))
        self.tensors: dict[str, Tensor] = {}
        self._config = config
        self._generator = generator

    def take_heads(self, name: str, heads: int) -> Tensor:
        return torch.zeros(heads)  # A_log, which is drawn with the horizons

    def _checked(self, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.randn(shape, generator=self._generator)
        if "norm" in name:
            tensor = 0.1 * tensor + self._config.stored_one(name)
        elif len(shape) == 1:
            tensor = 0.1 * tensor
        elif "embed_tokens" not in name:
            tensor = tensor / math.sqrt(shape[-1])  # activations keep their size
        self.tensors[name] = tensor
        return tensor


def _decay_weights(
    config: HybridConfig, generator: torch.Generator, horizons_tokens: tuple[float, float]
) -> dict[str, Tensor]:
    """``A_log`` and ``dt_bias`` for horizons between the bounds, evenly on a log scale; eq. 2 and 3 the other way."""
    geometry = config.geometry
    family = family_of_name(geometry.family)
    shape = (geometry.num_value_heads, geometry.units_per_head)
    shortest, longest = (math.log(h) for h in horizons_tokens)
    weights = {}
    for block in geometry.recurrent_layers:
        lean = 2 ** (2 * torch.rand((), generator=generator, dtype=torch.float64) - 1)  # towards short or long horizons
        horizons = torch.rand(shape, generator=generator, dtype=torch.float64) ** lean * (longest - shortest) + shortest
        g = math.log(EPSILON) / horizons.exp()
        A_log = 2 * torch.rand(shape[0], 1, generator=generator, dtype=torch.float64)
        if config.lower_bound is None:
            x = torch.special.expm1(-g / A_log.exp()).log()  # inverse of softplus
        else:
            x = torch.logit(g / config.lower_bound) / A_log.exp()
        dt_bias = x - family.default_gate_input
        name = f"{config.tensor_prefix}model.layers.{block}.{family.module}"
        weights[f"{name}.dt_bias"] = dt_bias.flatten().float()
        stored = torch.zeros(math.prod(family.A_log_shape(shape[0])))
        stored[: shape[0]] = A_log.flatten()
        weights[f"{name}.A_log"] = stored.view(family.A_log_shape(shape[0]))
    return weights
