"""The configuration of a runnable hybrid model."""

from __future__ import annotations

from dataclasses import dataclass

from dasc.geometry import StateGeometry
from dasc.models.hybrid.attention import AttentionConfig, GroupedAttentionConfig, LatentAttentionConfig
from dasc.models.hybrid.feed_forward import ExpertsConfig

RUNNABLE_FAMILIES = ("qwen3_next", "olmo_hybrid", "kimi_linear", "kimi_k3")


@dataclass(frozen=True)
class HybridConfig:
    """A hybrid model that :class:`~dasc.models.hybrid.model.HybridModel` can run.

    Attributes:
        geometry: the recurrent layers; its family is ``qwen3_next`` or ``olmo_hybrid`` (GDN and grouped attention),
            ``kimi_linear`` or ``kimi_k3`` (KDA and latent attention). ``kimi_k3`` stands for Kimi-Linear's blocks with
            the safe gate, not for all that Kimi-K3 has.
        lower_bound: of the safe gate (``kimi_k3``), negative; ``None`` for softplus.
        vocab_size: token ids are below it.
        hidden_size: width of the residual stream.
        norm_eps: epsilon of the root-mean-square norms.
        tied_embeddings: the output projection is the embedding, unless the weights hold one of its own.
        attention: the full-attention layers, all blocks that are not recurrent.
        mlp_size: intermediate size of the dense MLPs.
        experts: the mixture of experts; ``None`` when no block has one.
        expert_blocks: 0-based numbers of the blocks with experts, ascending.
        allow_neg_eigval: ``beta`` reaches 2 rather than 1 (``olmo_hybrid``).
    """

    geometry: StateGeometry
    lower_bound: float | None
    vocab_size: int
    hidden_size: int
    norm_eps: float
    tied_embeddings: bool
    attention: AttentionConfig
    mlp_size: int
    experts: ExpertsConfig | None
    expert_blocks: tuple[int, ...]
    allow_neg_eigval: bool = False

    def __post_init__(self) -> None:
        family, kind = self.geometry.family, self.geometry.kind
        if family not in RUNNABLE_FAMILIES:
            raise ValueError(f"family must be one of {', '.join(RUNNABLE_FAMILIES)} to be run, got {family!r}")
        if (self.lower_bound is not None) != (family == "kimi_k3"):
            raise ValueError(f"lower_bound must be given for kimi_k3 alone, got {self.lower_bound} for {family}")
        heads_and_dims = (self.geometry.num_value_heads, self.geometry.head_v_dim)
        if kind == "kda" and heads_and_dims != (self.geometry.num_key_heads, self.geometry.head_k_dim):
            raise ValueError(f"KDA must have as many key as value heads and equal dimensions, got {self.geometry}")
        attention = GroupedAttentionConfig if kind == "gdn" else LatentAttentionConfig
        if not isinstance(self.attention, attention):
            raise ValueError(f"attention must be {attention.__name__} for {kind}, got {type(self.attention).__name__}")
        if isinstance(self.attention, GroupedAttentionConfig) and self.attention.gated != (family == "qwen3_next"):
            raise ValueError(f"attention must be gated for qwen3_next alone, got {self.attention} for {family}")
        if self.allow_neg_eigval and family != "olmo_hybrid":
            raise ValueError(f"allow_neg_eigval must be False but for olmo_hybrid, got True for {family}")
        if self.experts is not None and family == "olmo_hybrid":
            raise ValueError(f"experts must be None for olmo_hybrid, got {self.experts}")
        if (self.experts is None) != (not self.expert_blocks):
            raise ValueError(
                f"experts must be given where blocks have them, got {self.experts} and {self.expert_blocks}"
            )

    @property
    def attention_blocks(self) -> tuple[int, ...]:
        """0-based numbers of the ``A`` full-attention blocks, ascending."""
        return tuple(b for b in range(self.geometry.num_blocks) if b not in self.geometry.recurrent_layers)

    @property
    def stores_norm_difference(self) -> bool:
        """Norms of the residual stream, queries and keys are stored as the difference of their weight to 1."""
        return self.geometry.family == "qwen3_next"

    def stored_one(self, name: str) -> float:
        """How the norm of that name is stored when its weight is 1."""
        return 0.0 if self.stores_norm_difference and not name.endswith("linear_attn.norm.weight") else 1.0

    @property
    def tensor_prefix(self) -> str:
        """What stands before ``model.`` and ``lm_head.`` in tensor names."""
        return "language_model." if self.geometry.family == "kimi_k3" else ""
