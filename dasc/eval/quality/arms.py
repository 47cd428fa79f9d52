"""The arms of a quality evaluation: how checkpoints are stored, at which cutoff, with which random mask."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass

from dasc.eval.replay_arms import ARMS, Arm
from dasc.planner import DEFAULT_W_MAX
from dasc.reference import RANDOM_MASK_SEEDS

METHODS: dict[str, Arm] = {
    "dense": ARMS["dense"],
    **{name: dataclasses.replace(ARMS[name], spill=False) for name in ("nr", "wr", "random", "padded", "int8", "int4")},
    "observed": Arm(observed=True, spill=False),
    "int8-all": Arm(selected=False, quantized="int8", spill=False),
    "int4-all": Arm(selected=False, quantized="int4", spill=False),
}
"""By name. All but ``dense`` hold compressed checkpoints only (appendix C.2).

``observed`` keeps as many units as ``nr`` does, those with the largest observed magnitudes. ``int8`` stores the
selected units as INT8, ``int8-all`` all units, and ``int4`` and ``int4-all`` do so as INT4. All but ``wr`` load by NR.
"""

SHORT_TOKENS = 1024
SHORT_W_MAX = (16, 32, 64, 128, 256)


def default_w_max(longest_tokens: int) -> tuple[int, ...]:
    """The grid of cutoffs for prompts of at most so many tokens.

    The paper's, of 16 to 512 tokens, is for prompts of thousands of tokens; short ones have a closer grid that ends
    sooner.
    """
    return SHORT_W_MAX if longest_tokens <= SHORT_TOKENS else DEFAULT_W_MAX


@dataclass(frozen=True)
class ArmSpec:
    """One arm.

    Attributes:
        method: of :data:`METHODS`.
        w_max: cutoff in tokens; ``None`` for methods that select nothing.
        mask_seed: of a random mask, ``None`` for other methods.

    Raises:
        ValueError: naming the field.
    """

    method: str
    w_max: int | None = None
    mask_seed: int | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method of an arm must be of {', '.join(METHODS)}, got {self.method!r}")
        if selects(self.method) != (self.w_max is not None):
            wanted = "a W_max, such as 'nr 16'" if selects(self.method) else "no W_max"
            raise ValueError(f"an arm {self.method!r} takes {wanted}, got {self.w_max}")
        if (self.method == "random") != (self.mask_seed is not None):
            raise ValueError(f"an arm has a mask's seed if it is random, such as 'random 16 1234', got {self.label!r}")

    @property
    def label(self) -> str:
        """Method, cutoff and seed with spaces between them."""
        return " ".join(str(part) for part in (self.method, self.w_max, self.mask_seed) if part is not None)

    @classmethod
    def parse(cls, label: str) -> ArmSpec:
        """The arm of a label.

        Raises:
            ValueError: for anything else.
        """
        found = re.fullmatch(r"(\S+)(?: (\d+))?(?: (\d+))?", label)
        if not found:
            raise ValueError(f"an arm is a method, then its W_max, then a mask's seed, got {label!r}")
        method, *numbers = found.groups()
        return cls(method, *(None if number is None else int(number) for number in numbers))


def selects(method: str) -> bool:
    """Whether the cutoff matters to a method."""
    arm = METHODS[method]
    return arm.compressed and arm.selected


def expand(methods: Sequence[str], w_max: Sequence[int]) -> list[ArmSpec]:
    """The arms of methods over a grid of cutoffs, five random masks for each; a method after the other.

    Raises:
        ValueError: for an unknown method, or none.
    """
    if not methods:
        raise ValueError("arms must name at least one method, got none")
    arms: list[ArmSpec] = []
    for method in dict.fromkeys(methods):
        if method not in METHODS:
            raise ValueError(f"arms must be of {', '.join(METHODS)}, got {method!r}")
        seeds = RANDOM_MASK_SEEDS if method == "random" else (None,)
        cutoffs = w_max if selects(method) else (None,)
        arms += [ArmSpec(method, w, seed) for w in cutoffs for seed in seeds]
    return arms
