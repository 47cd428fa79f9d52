"""What follows the mixer of a block: a gated MLP, or a mixture of experts with a shared one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dasc.models.hybrid.weights import Linear, WeightReader


@dataclass(frozen=True)
class ExpertsConfig:
    """Mixture of experts.

    Attributes:
        router: ``"softmax"`` over all experts (Qwen3-Next), or ``"sigmoid"`` of each, chosen by score plus a stored
            correction within the best groups (Kimi-Linear).
        num_experts: routed experts.
        top_k: experts of a token.
        size: intermediate size of a routed expert.
        shared_size: intermediate size of the shared expert.
        normalize: divide the weights of a token's experts by their sum.
        scale: factor of the routed part; 1 for ``"softmax"``.
        groups: equal groups of adjacent experts, ranked by the sum of their two best; 1 for ``"softmax"``.
        top_groups: groups that a token may choose from.
    """

    router: Literal["softmax", "sigmoid"]
    num_experts: int
    top_k: int
    size: int
    shared_size: int
    normalize: bool
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"experts of a token must be 1 to num_experts = {self.num_experts}, got {self.top_k}")
        if self.groups < 1 or self.num_experts % self.groups or not 1 <= self.top_groups <= self.groups:
            raise ValueError(
                f"expert groups must divide {self.num_experts} experts and be at least top_groups = {self.top_groups}, "
                f"got {self.groups}"
            )


class GatedMLP:
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(
        self, weights: WeightReader, name: str, hidden: int, size: int, names: tuple[str, str, str] | None = None
    ) -> None:
        gate, up, down = names or ("gate_proj", "up_proj", "down_proj")
        self.gate = Linear.read(weights, f"{name}.{gate}", size, hidden)
        self.up = Linear.read(weights, f"{name}.{up}", size, hidden)
        self.down = Linear.read(weights, f"{name}.{down}", hidden, size)

    def __call__(self, x: Tensor) -> Tensor:
        """Apply to ``[T, hidden]``."""
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


class MixtureOfExperts:
    """Routed experts and a shared one, over packed tokens."""

    def __init__(self, weights: WeightReader, name: str, hidden: int, config: ExpertsConfig) -> None:
        self.config = config
        self.router = weights.take_wide(f"{name}.gate.weight", config.num_experts, hidden)
        self.correction: Tensor | None = None
        self.shared_gate: Linear | None = None
        if config.router == "sigmoid":
            self.correction = weights.take_wide(f"{name}.gate.e_score_correction_bias", config.num_experts)
            shared, expert_names = f"{name}.shared_experts", ("w1", "w3", "w2")
        else:
            self.shared_gate = Linear.read(weights, f"{name}.shared_expert_gate", 1, hidden)
            shared, expert_names = f"{name}.shared_expert", ("gate_proj", "up_proj", "down_proj")
        self.shared = GatedMLP(weights, shared, hidden, config.shared_size)
        self.experts = [
            GatedMLP(weights, f"{name}.experts.{e}", hidden, config.size, expert_names)
            for e in range(config.num_experts)
        ]

    def __call__(self, x: Tensor) -> Tensor:
        """Apply to ``[T, hidden]``."""
        chosen, strength = self.route(x)
        y = self.shared(x)
        if self.shared_gate is not None:
            y = self.shared_gate(x).sigmoid() * y
        for number, expert in enumerate(self.experts):
            token, choice = (chosen == number).nonzero(as_tuple=True)
            if len(token):
                y[token] += strength[token, choice, None].to(x.dtype) * expert(x[token])
        return y

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Experts of each token and their weights, both ``[T, top_k]``."""
        config = self.config
        logits = x.to(self.router.dtype) @ self.router.T
        if self.correction is None:
            strength, chosen = logits.softmax(dim=-1).topk(config.top_k, dim=-1)
        else:
            scores = logits.sigmoid()
            chosen = self._within_groups(scores + self.correction).topk(config.top_k, dim=-1).indices
            strength = scores.gather(1, chosen)
        if config.normalize:
            strength = strength / strength.sum(dim=-1, keepdim=True)
        return chosen, strength * config.scale

    def _within_groups(self, scores: Tensor) -> Tensor:
        """``scores`` with ``-inf`` outside the best groups of each token."""
        if self.config.groups == 1:
            return scores
        grouped = scores.view(len(scores), self.config.groups, -1)
        best = grouped.topk(min(2, grouped.shape[2]), dim=-1).values.sum(dim=-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(1, best.topk(self.config.top_groups, dim=-1).indices, True)
        return grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)
