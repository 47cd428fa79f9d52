"""From chat messages to token ids, for models with a tokenizer and for small ones that read bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Protocol

Role = Literal["system", "user", "assistant"]

TOKENIZER_FILE = "tokenizer.json"


class ChatTokens(Protocol):
    """A vocabulary and how a conversation is written in it.

    A conversation is its messages one after the other, each with a head that names its role and an end. A prompt is
    what comes before an answer, with the head of that answer. Every part is turned into ids by itself, so that what a
    later prompt repeats has the same ids again.
    """

    @property
    def vocabulary(self) -> int:
        """All ids are below it."""

    def head(self, role: Role) -> list[int]:
        """Ids before a message's text."""

    def text(self, text: str) -> list[int]:
        """Ids of a message's text."""

    def end(self) -> list[int]:
        """Ids after it."""


class ByteTokens:
    """UTF-8 bytes are ids 0 to 255; 256, 257 and 258 are the heads of the roles, 259 ends a message."""

    vocabulary = 260

    def head(self, role: Role) -> list[int]:
        return [{"system": 256, "user": 257, "assistant": 258}[role]]

    def text(self, text: str) -> list[int]:
        """Ids of the text's bytes.

        Raises:
            ValueError: for text that is no Unicode, such as half of a surrogate pair.
        """
        return list(text.encode())

    def end(self) -> list[int]:
        return [259]


class FileTokens:
    """The ids of a tokenizer.json. Heads are the text ``"user: "`` and so on, the end is a line break.

    No chat template is applied: replayed outputs are compared with each other, not read.

    Args:
        path: of the file.

    Raises:
        ImportError: without the tokenizers package.
        ValueError: for a file that it cannot read.
    """

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ImportError(f"{path} needs the tokenizers package: pip install tokenizers") from error
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises nothing more particular
            raise ValueError(f"{path}: cannot be read as a tokenizer ({error})") from error
        self.vocabulary = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    def head(self, role: Role) -> list[int]:
        return self.text(f"{role}: ")

    def text(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def end(self) -> list[int]:
        return self.text("\n")


def chat_tokens(folder: Path, vocab_size: int) -> ChatTokens:
    """The tokenizer of the model in ``folder``: its tokenizer.json, or bytes if there is none.

    Raises:
        ImportError: as :class:`FileTokens`.
        ValueError: when the tokenizer has ids that the model, whose ids are below ``vocab_size``, does not have.
    """
    path = folder / TOKENIZER_FILE
    tokens: ChatTokens = FileTokens(path) if path.exists() else ByteTokens()
    if tokens.vocabulary > vocab_size:
        name = str(path) if path.exists() else f"the byte tokenizer ({folder} has no {TOKENIZER_FILE})"
        raise ValueError(f"{name} has {tokens.vocabulary} ids, but the model has {vocab_size}")
    return tokens
