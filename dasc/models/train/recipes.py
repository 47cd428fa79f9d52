"""The models that are trained, on what and for how long."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from dasc.geometry import StateGeometry
from dasc.models.hybrid.attention import AttentionConfig, GroupedAttentionConfig, LatentAttentionConfig
from dasc.models.hybrid.config import HybridConfig
from dasc.models.tasks import TASKS, VOCABULARY

_RECURRENT = (0, 1, 3, 4)
_BLOCKS = 6
_HIDDEN = 96


@dataclass(frozen=True)
class Stage:
    """A part of the curriculum.

    Attributes:
        until: the step it ends before.
        lengths: tokens of a sequence, one of these for each batch.
        without_states: tasks whose recurrent states are replaced before the questions, so that attention has to
            answer.
    """

    until: int
    lengths: tuple[int, ...]
    without_states: tuple[str, ...] = ()


# Contexts this short fit into the recurrent states, and small models learn to recall from these before they learn to
# attend. Where contexts are long the states are too small, and attention has to recall: so it is made to here.
_RECALL = ("recall_single", "recall_multi", "multi_value")


CURRICULUM = (
    Stage(1_500, (32, 64), _RECALL),
    Stage(2_200, (64, 128), _RECALL),
    Stage(3_000, (64, 128, 256), _RECALL),
    Stage(7_500, (128, 256, 512), _RECALL),
)


@dataclass(frozen=True)
class Recipe:
    """A model and its training.

    Attributes:
        config: of the model.
        tasks: what it learns.
        exercises: what it is trained on besides.
        steps: updates.
        batch_tokens: of an update, all sequences together.
        learning_rate: its highest.
        warmup: steps over which it rises.
        restarts: steps by which it has fallen to zero, over a fifth of the steps before, and rises again.
        weight_decay: of matrices, the embedding left out.
        clip: largest norm of a gradient.
        curriculum: stages, the last one until the last step.
    """

    config: HybridConfig
    tasks: tuple[str, ...] = tuple(TASKS)
    exercises: tuple[str, ...] = ()
    steps: int = 7_500
    batch_tokens: int = 2048
    learning_rate: float = 2e-3
    warmup: int = 200
    restarts: tuple[int, ...] = (4_500,)
    weight_decay: float = 0.05
    clip: float = 1.0
    curriculum: tuple[Stage, ...] = CURRICULUM

    def stage(self, step: int) -> Stage:
        """The part of the curriculum that a step belongs to."""
        return next(stage for stage in self.curriculum if step < stage.until)

    def rate(self, step: int) -> float:
        """Learning rate at a step."""
        bounds = (0, *self.restarts, self.steps)
        first, end = next((first, end) for first, end in pairwise(bounds) if step < end)
        rise = (step - first + 1) / self.warmup
        fall = (end - step) / (0.2 * (end - first))
        return self.learning_rate * min(rise, fall, 1.0)


def _config(
    geometry: StateGeometry,
    attention: AttentionConfig,
    lower_bound: float | None = None,
    *,
    allow_neg_eigval: bool = False,
) -> HybridConfig:
    return HybridConfig(
        geometry=geometry,
        lower_bound=lower_bound,
        vocab_size=VOCABULARY,
        hidden_size=_HIDDEN,
        norm_eps=1e-6,
        tied_embeddings=False,
        attention=attention,
        mlp_size=2 * _HIDDEN,
        experts=None,
        expert_blocks=(),
        allow_neg_eigval=allow_neg_eigval,
    )


def _kimi(family: str, lower_bound: float | None) -> HybridConfig:
    geometry = StateGeometry(
        family=family,
        kind="kda",
        num_blocks=_BLOCKS,
        recurrent_layers=_RECURRENT,
        num_value_heads=4,
        num_key_heads=4,
        head_v_dim=32,
        head_k_dim=32,
    )
    attention = LatentAttentionConfig(2, kv_rank=48, q_rank=None, qk_nope_dim=32, qk_rope_dim=16, v_dim=32)
    return _config(geometry, attention, lower_bound)


def _gdn(
    family: str, heads: tuple[int, int, int], attention: GroupedAttentionConfig, *, allow_neg_eigval: bool = False
) -> HybridConfig:
    """``heads`` are value heads, key heads and the channels of a value head."""
    num_value_heads, num_key_heads, head_v_dim = heads
    geometry = StateGeometry(
        family=family,
        kind="gdn",
        num_blocks=_BLOCKS,
        recurrent_layers=_RECURRENT,
        num_value_heads=num_value_heads,
        num_key_heads=num_key_heads,
        head_v_dim=head_v_dim,
        head_k_dim=32,
    )
    return _config(geometry, attention, allow_neg_eigval=allow_neg_eigval)


_ROTATED = GroupedAttentionConfig(2, 1, 32, rotary_dim=16, rope_theta=10_000.0)
_WITHOUT_POSITIONS = GroupedAttentionConfig(2, 1, 32, rotary_dim=0, rope_theta=10_000.0, gated=False)


# What the models above cannot learn: to flip a sign takes a beta above 1. Of the permutations, those that one token's
# reflection can do are an exercise; from them the model learns the others, which take two.
_TRACKING = Recipe(
    _gdn("olmo_hybrid", (4, 4, 32), _WITHOUT_POSITIONS, allow_neg_eigval=True),
    tasks=("common_words", "frequent_words", "parity", "permutation"),
    exercises=("swapping",),
    steps=3_600,
    restarts=(),
    curriculum=(Stage(1_300, (32, 64)), Stage(2_000, (64, 128)), Stage(3_600, (128, 256, 512))),
)

# What the models above hardly begin to learn: to find a place in a text again, by words that occur in many. The
# questions of the task alone are too few to learn it from.
_TEXT = Recipe(
    _kimi("kimi_linear", None),
    tasks=("text",),
    exercises=("recitation",),
    steps=3_000,
    restarts=(),
    curriculum=(Stage(1_000, (96, 128)), Stage(2_000, (128, 192)), Stage(3_000, (192, 256, 512))),
)

RECIPES: dict[str, Recipe] = {
    "kda": Recipe(_kimi("kimi_linear", None)),
    "kda-safe": Recipe(_kimi("kimi_k3", -5.0)),
    "gdn": Recipe(_gdn("qwen3_next", (8, 4, 16), _ROTATED)),
    "gdn-tracking": _TRACKING,
    "kda-text": _TEXT,
}
"""By name of the folder in ``dasc/models/zoo``."""
