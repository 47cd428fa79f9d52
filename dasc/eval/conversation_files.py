"""Recorded conversations from JSON lines: OpenAI-style messages or ShareGPT-style turns."""

from __future__ import annotations

import json
from pathlib import Path

from dasc.eval.chat_tokens import ChatTokens, Role
from dasc.eval.conversations import Limits, Message, Turn, conversation_turns

ROLES: dict[str, Role] = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "developer": "system",
    "tool": "user",
}
_FORMS = {"messages": ("role", "content"), "conversations": ("from", "value")}


def read_conversations(
    path: Path, tokens: ChatTokens, limits: Limits, vocab_size: int, count: int | None = None
) -> list[list[Turn]]:
    """The turns of each conversation in a file; blank lines are none.

    A line is ``{"messages": [{"role", "content"}, ..]}`` or ``{"conversations": [{"from", "value"}, ..]}``; other keys
    are ignored. Roles are ``system`` (``developer``), ``user`` (``human``, ``tool``) and ``assistant`` (``gpt``,
    ``chatgpt``). A content is text, a list of text parts ``{"type": "text", "text"}``, nothing (``null``), or a list of
    token ids.

    Args:
        path: of the file, UTF-8.
        tokens: turns text into ids.
        limits: of what is taken.
        vocab_size: ids must be below it.
        count: take the first so many; all when ``None``.

    Raises:
        ValueError: naming the file and the line, for a line that is no conversation, and as
            :func:`~dasc.eval.conversations.conversation_turns`; naming the file, for one without conversations.
        OSError: when the file cannot be read.
    """
    conversations: list[list[Turn]] = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if len(conversations) == count:
                break
            if not line.strip():
                continue
            try:
                conversations.append(conversation_turns(_messages(line), tokens, limits, vocab_size))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from error
    if not conversations:
        raise ValueError(f"{path}: expected conversations, one a line, found none")
    return conversations


def _messages(line: bytes) -> list[Message]:
    try:
        value = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected a JSON object, got broken JSON ({error})") from error
    keys = [key for key in _FORMS if isinstance(value, dict) and key in value]
    if len(keys) != 1 or not isinstance(value[keys[0]], list):
        raise ValueError("expected an object with a list of either 'messages' or 'conversations'")
    entries = value[keys[0]]
    if not entries:
        raise ValueError(f"expected at least one entry in {keys[0]!r}, got none")
    return [_message(entry, f"{keys[0]}[{i}]", *_FORMS[keys[0]]) for i, entry in enumerate(entries)]


def _message(entry: object, where: str, role_key: str, content_key: str) -> Message:
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be an object, got a {type(entry).__name__}")
    role, content = entry.get(role_key), entry.get(content_key)
    if not isinstance(role, str) or role not in ROLES:
        raise ValueError(f"{where}.{role_key} must be one of {', '.join(ROLES)}, got {role!r}")
    if isinstance(content, list) and all(type(token) is int for token in content):
        return Message(ROLES[role], tuple(content))
    if content_key in entry and content is None:  # an assistant's call of a tool
        content = ""
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ValueError(f"{where}.{content_key} must be text, text parts or a list of token ids, got {content!r:.80}")
    return Message(ROLES[role], content)
