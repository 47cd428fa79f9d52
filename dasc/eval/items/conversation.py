"""A long conversation as text: what the questions of LoCoMo-style items are about."""

from __future__ import annotations

import re
from typing import Any

_SESSION = re.compile(r"session_(\d+)")


def conversation_text(conversation: object) -> str:
    """The conversation, a line for each thing said.

    Args:
        conversation: text, taken as it is; a list of ``{"speaker", "text"}``; or LoCoMo's object, with
            ``"session_1": [{"speaker", "text"}, ..]``, ``"session_1_date_time"`` and so on. A shared picture is told by
            its ``"blip_caption"``.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(conversation, str) and conversation:
        return conversation
    if isinstance(conversation, list):
        return _said(conversation, "conversation")
    if isinstance(conversation, dict):
        numbers = sorted(int(match[1]) for key in conversation if (match := _SESSION.fullmatch(key)))
        if numbers:
            return "\n\n".join(_session(conversation, number) for number in numbers)
    raise ValueError(
        "conversation must be text, a list of {'speaker', 'text'} or an object with 'session_1', 'session_2' .., "
        f"got {conversation!r:.80}"
    )


def _session(conversation: dict[str, Any], number: int) -> str:
    name = f"session_{number}"
    date = conversation.get(f"{name}_date_time")
    heading = f"Session {number}, {date}:" if date else f"Session {number}:"
    return f"{heading}\n{_said(conversation[name], f'conversation.{name}')}"


def _said(turns: object, name: str) -> str:
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{name} must be a list of {{'speaker', 'text'}} that is not empty, got {turns!r:.80}")
    lines = []
    for i, turn in enumerate(turns):
        speaker, text = (turn.get("speaker"), turn.get("text")) if isinstance(turn, dict) else (None, None)
        if not isinstance(speaker, str) or not isinstance(text, str):
            raise ValueError(f"{name}[{i}] must be an object with 'speaker' and 'text', got {turn!r:.80}")
        picture = turn.get("blip_caption")
        lines.append(f"{speaker}: {text}" + (f" [shares a picture: {picture}]" if picture else ""))
    return "\n".join(lines)
