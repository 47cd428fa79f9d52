"""What a quality evaluation asks of whoever serves the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dasc.eval.items import Text


@dataclass(frozen=True)
class Query:
    """One request.

    Attributes:
        name: unique among the requests asked together.
        prompt: text or token ids.
        max_new_tokens: most tokens of the answer.
        temperature: 0 takes the likeliest tokens.
        seed: of what is drawn.
        warm: fills the cache and is not measured; the other requests leave nothing behind where a backend can help it.
        repeated: warm only: a measured prompt is exactly this one. As one token must always be computed, only a state
            before the last token serves it.
    """

    name: str
    prompt: Text = field(repr=False)
    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    warm: bool = False
    repeated: bool = False


@dataclass(frozen=True)
class Reply:
    """What a request was answered.

    Attributes:
        name: of the request.
        answer: text for text, token ids for token ids.
        prompt_tokens: length of the prompt, ``C + N``.
        cached_tokens: of them from the cache, ``C``.
        finish: why it ended, e.g. ``"length"``.
        ttft_s: to the first token, from when the client sent it; ``None`` if there was none.
    """

    name: str
    answer: Text
    prompt_tokens: int
    cached_tokens: int
    finish: str
    ttft_s: float | None

    def __post_init__(self) -> None:
        if not 0 <= self.cached_tokens <= self.prompt_tokens:
            raise ValueError(
                f"cached_tokens of request {self.name!r} must be from 0 to its {self.prompt_tokens} prompt tokens, "
                f"got {self.cached_tokens}"
            )


@dataclass(frozen=True)
class Residency:
    """What the cache holds now; ``None`` for what a backend cannot tell.

    Attributes:
        available_slots: checkpoint slots that are free.
        evictions: checkpoints dropped since the start.
    """

    available_slots: int | None = None
    evictions: int | None = None


class BackendError(ValueError):
    """The backend does not answer, or not as it must. Finished blocks stay; the run can be resumed."""


class Backend(Protocol):
    """Serves one arm."""

    def flush(self) -> None:
        """Empty the cache.

        Raises:
            BackendError: when it is not empty afterwards.
        """

    def ask(self, queries: Sequence[Query], concurrency: int, on_reply: Callable[[], None]) -> list[Reply]:
        """Answer all of them, ``concurrency`` at a time, in the order given.

        Args:
            queries: what is asked.
            concurrency: clients.
            on_reply: called for each answer.

        Returns:
            The answers in the order of ``queries``.

        Raises:
            BackendError: when one is not answered.
        """

    def residency(self) -> Residency:
        """What the cache holds, when nothing is running."""

    def settings(self) -> dict[str, Any]:
        """What distinguishes this arm, as plain JSON values."""

    def close(self) -> None:
        """Give back what it holds."""
