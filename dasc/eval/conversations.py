"""Conversations to replay: frozen prompts, one a turn, and how many tokens each answer takes (appendix C.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dasc.eval.chat_tokens import ChatTokens, Role

FIRST_PROMPT_TOKENS = (1024, 8192)  # appendix C.3
MEDIAN_FIRST_PROMPT_TOKENS = 2500
MEAN_USER_TOKENS, MEAN_ANSWER_TOKENS = 296, 441  # later user turns and answers in WildChat
TURN_TOKENS = (8, 1024)  # both are clipped to this
SYSTEM_TOKENS, SYSTEM_PROMPTS, SYSTEM_SHARE = 600, 4, 0.4


@dataclass(frozen=True)
class Message:
    """One message: its text, or its token ids as they are."""

    role: Role
    content: str | tuple[int, ...]


@dataclass(frozen=True)
class Turn:
    """One request.

    Attributes:
        prompt: token ids of the conversation so far and the head of the answer.
        answer_tokens: tokens to generate, as many as the recorded answer has.
        right: the only right answer, where there is one.
    """

    prompt: tuple[int, ...]
    answer_tokens: int
    right: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Limits:
    """What is taken of a conversation.

    Attributes:
        turns: first turns.
        answer_tokens: most tokens to generate; longer answers are cut, in prompts they stay whole.
        context_tokens: most tokens of a prompt and its answer; more is an error.
    """

    turns: int = 4
    answer_tokens: int = 1024
    context_tokens: int = 16_384


def conversation_turns(messages: Sequence[Message], tokens: ChatTokens, limits: Limits, vocab_size: int) -> list[Turn]:
    """The turns of a conversation: one for every answer to a user, and one if the last word is a user's.

    Prompts hold the recorded answers, not what a model would say: they are the same whoever answers. An answer that
    follows no user message is part of the prompts after it. A last user message without an answer gets
    ``limits.answer_tokens``.

    Args:
        messages: in order.
        tokens: turns text into ids.
        limits: of what is taken.
        vocab_size: ids must be below it.

    Raises:
        ValueError: for no turn, ids outside the vocabulary, text that has no ids, or a turn beyond ``context_tokens``.
    """
    turns: list[Turn] = []
    context: list[int] = []
    asked = False

    def add_turn(answer_tokens: int) -> None:
        turn = Turn((*context, *tokens.head("assistant")), min(max(answer_tokens, 1), limits.answer_tokens))
        needed = len(turn.prompt) + turn.answer_tokens
        if needed > limits.context_tokens:
            raise ValueError(f"turn {len(turns) + 1} takes {needed} tokens, the limit is {limits.context_tokens}")
        turns.append(turn)

    for message in messages:
        ids = tokens.text(message.content) if isinstance(message.content, str) else list(message.content)
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            raise ValueError(f"token ids must be in [0, {vocab_size}), got {min(ids)} to {max(ids)}")
        if message.role == "assistant" and asked:
            add_turn(len(ids))
            asked = False
        if len(turns) == limits.turns:
            return turns
        asked = asked or message.role == "user"
        context += [*tokens.head(message.role), *ids, *tokens.end()]
    if asked:
        add_turn(limits.answer_tokens)
    if not turns:
        raise ValueError("the conversation has no user message to answer")
    return turns


def generate_conversations(count: int, *, turns: int = 4, scale: float = 1.0, seed: int = 0) -> list[list[Message]]:
    """Made-up chats with lengths like WildChat's, of words that nobody speaks. The same arguments give the same chats.

    Lengths are in characters, one byte each. First prompts are log-normal between 1,024 and 8,192 (appendix C.3), later
    user turns and answers log-normal with WildChat's means, up to 1,024; ``scale`` multiplies them all. Not of
    WildChat: two chats in five begin with one of four system prompts, which are shared prefixes.

    Args:
        count: chats.
        turns: user messages with answers in each.
        scale: of all lengths; each stays at least one character.
        seed: of everything drawn.

    Raises:
        ValueError: for no chats or turns, or a scale that is not positive and finite.
    """
    if count < 1 or turns < 1 or not 0 < scale < math.inf:
        raise ValueError(f"count and turns must be >= 1 and scale positive, got {count}, {turns} and {scale}")
    rng = np.random.default_rng(seed)
    words = _words(rng)

    def text(tokens: float) -> str:
        return _text(rng, words, max(round(tokens * scale), 1))

    def clipped(median: float, sigma: float, bounds: tuple[int, int]) -> float:
        return float(np.clip(median * math.exp(sigma * rng.standard_normal()), *bounds))

    systems = [text(SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPTS)]
    chats: list[list[Message]] = []
    for _ in range(count):
        chat = []
        if rng.random() < SYSTEM_SHARE:
            chat.append(Message("system", systems[rng.integers(len(systems))]))
        for turn in range(turns):
            if turn == 0:
                asked = clipped(MEDIAN_FIRST_PROMPT_TOKENS, 0.7, FIRST_PROMPT_TOKENS)
            else:
                asked = clipped(MEAN_USER_TOKENS * math.exp(-0.5), 1.0, TURN_TOKENS)
            chat.append(Message("user", text(asked)))
            answered = clipped(MEAN_ANSWER_TOKENS * math.exp(-0.32), 0.8, TURN_TOKENS)
            chat.append(Message("assistant", text(answered)))
        chats.append(chat)
    return chats


def _words(rng: np.random.Generator, count: int = 500) -> list[str]:
    """Words of one to three syllables."""
    consonants, vowels = list("bcdfghjklmnprstvwz"), list("aeiou")
    return [
        "".join(rng.choice(consonants) + rng.choice(vowels) for _ in range(rng.integers(1, 4))) for _ in range(count)
    ]


def _text(rng: np.random.Generator, words: list[str], length: int) -> str:
    """Exactly ``length`` characters; few words make up most of it, as in languages."""
    text = ""
    while len(text) < length:
        rank = int(len(words) ** rng.random()) - 1
        text += words[rank] + (". " if rng.random() < 0.1 else " ")
    return text[:length]
