"""What a quality evaluation asks: items, each of a prefix that a cache holds and of the prompts that go on from it."""

from __future__ import annotations

from dataclasses import dataclass, field

Text = str | tuple[int, ...]
"""Text, for a model with a tokenizer, or token ids, for the bundled models."""


@dataclass(frozen=True)
class Ask:
    """One prompt and its right answers.

    Attributes:
        prompt: all of it: what the item has warmed, or more.
        references: right answers; what they mean is the scorer's business.
    """

    prompt: Text = field(repr=False)
    references: tuple[Text, ...]

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ValueError("prompt must not be empty")
        if not self.references:
            raise ValueError("references must hold a right answer, got none")


@dataclass(frozen=True)
class Item:
    """One problem or instance, the unit of every statistic: its asks and their replays are averaged (appendix C.2).

    Attributes:
        item_id: unique within its task.
        task: what it belongs to, a row of the table.
        warm: prompt of the unscored request that fills the cache; each ask's prompt begins with it.
        asks: what is measured, at least one.
        scorer: name in :data:`dasc.eval.items.SCORERS`.
        max_new_tokens: most tokens of an answer.
        choices: letters of a multiple-choice question.
        replays: measured requests of each ask after the warm one (appendix C.2).
    """

    item_id: str
    task: str
    warm: Text = field(repr=False)
    asks: tuple[Ask, ...]
    scorer: str
    max_new_tokens: int
    choices: tuple[str, ...] = ()
    replays: int = 1

    def __post_init__(self) -> None:
        if not self.asks:
            raise ValueError(f"asks of item {self.item_id!r} must hold a prompt, got none")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens of item {self.item_id!r} must be >= 1, got {self.max_new_tokens}")
        if self.replays < 1:
            raise ValueError(f"replays of item {self.item_id!r} must be >= 1, got {self.replays}")
        for ask in self.asks:
            if type(ask.prompt) is not type(self.warm) or ask.prompt[: len(self.warm)] != self.warm:
                raise ValueError(f"each prompt of item {self.item_id!r} must begin with what is warmed")
