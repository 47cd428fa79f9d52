"""Where checkpoints are taken while a request runs. Its end is always offered to the cache when it finishes.

A policy names the next position at which the engine must stop and checkpoint; positions are exact token counts on whole
pages. Several policies together take the nearest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol


class PromptInfo(NamedTuple):
    """What a policy may look at.

    Attributes:
        prompt_tokens: length of the prompt.
        page_size: tokens a page.
        junction: where KV matched further than any state when the request came: other requests went another way there,
            or the state has gone. ``None`` when a state served all that KV had.
    """

    prompt_tokens: int
    page_size: int
    junction: int | None


class CheckpointPolicy(Protocol):
    """Names the positions worth a checkpoint."""

    def check(self, page_size: int) -> None:
        """Raise ``ValueError`` when the policy can never name a position on whole pages."""

    def next_stop(self, position: int, prompt: PromptInfo) -> int | None:
        """The first position after ``position`` to stop at, ``None`` when there is none."""


@dataclass(frozen=True)
class AtPromptEnd:
    """The last whole page of the prompt that leaves at least one token to compute.

    Serves the identical prompt sent again (which can use no more than all but its last token) and, but for the part of
    a page, prompts that extend this one.
    """

    def check(self, page_size: int) -> None:
        """Any page will do."""

    def next_stop(self, position: int, prompt: PromptInfo) -> int | None:
        """The end of the prompt, once."""
        stop = (prompt.prompt_tokens - 1) // prompt.page_size * prompt.page_size
        return stop if stop > position else None


@dataclass(frozen=True)
class AfterPrompt:
    """The very end of the prompt, as SGLang stores: it costs no pass of its own, but an identical prompt misses it."""

    def check(self, page_size: int) -> None:
        """Only pages of one token end everywhere.

        Raises:
            ValueError: for larger ones.
        """
        if page_size != 1:
            raise ValueError(f"the end of a prompt is the end of a page only with pages of 1 token, got {page_size}")

    def next_stop(self, position: int, prompt: PromptInfo) -> int | None:
        """The end, once."""
        return prompt.prompt_tokens if position < prompt.prompt_tokens else None


@dataclass(frozen=True)
class EveryTokens:
    """Every multiple of ``tokens``, in prompt and output.

    Raises:
        ValueError: for a distance below one token.
    """

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"tokens between checkpoints must be >= 1, got {self.tokens}")

    def check(self, page_size: int) -> None:
        """The distance must be whole pages.

        Raises:
            ValueError: when it is not.
        """
        if self.tokens % page_size:
            raise ValueError(
                f"tokens between checkpoints must be a multiple of the page ({page_size} tokens), got {self.tokens}"
            )

    def next_stop(self, position: int, prompt: PromptInfo) -> int | None:
        """The next multiple."""
        return (position // self.tokens + 1) * self.tokens


@dataclass(frozen=True)
class AtJunctions:
    """Where a second request meets a prefix that an earlier one left without a state (Marconi's admission).

    The first request to pass a branch point cannot know that it is one; the second stores a checkpoint there, and the
    third is served by it.

    Attributes:
        min_gain_tokens: what a checkpoint must add to the last state to be worth its slot. Prompts that share no more
            than a role's header would otherwise keep a checkpoint after it, for ever young.

    Raises:
        ValueError: for a gain below one token.
    """

    min_gain_tokens: int = 1

    def __post_init__(self) -> None:
        if self.min_gain_tokens < 1:
            raise ValueError(f"min_gain_tokens must be >= 1, got {self.min_gain_tokens}")

    def check(self, page_size: int) -> None:
        """Junctions lie on pages already."""

    def next_stop(self, position: int, prompt: PromptInfo) -> int | None:
        """The junction, once, if it is far enough from ``position``."""
        junction = prompt.junction
        return junction if junction is not None and junction - position >= self.min_gain_tokens else None


def next_stop(policies: tuple[CheckpointPolicy, ...], position: int, prompt: PromptInfo) -> int | None:
    """The nearest stop of several policies."""
    stops = [stop for policy in policies if (stop := policy.next_stop(position, prompt)) is not None]
    return min(stops, default=None)
