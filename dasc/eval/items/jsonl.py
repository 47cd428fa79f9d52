r"""Items from files of JSON lines, users' own or exported ones.

A line is one of three:

- a question: ``{"question", "answer" or "answers"}`` with, if wanted, ``"id"``, ``"task"``, ``"choices"``, ``"kind"``,
  ``"replays"`` and ``"max_new_tokens"``. The question is put into a prompt that says how to answer; ``"prompt"`` in
  place of ``"question"`` is taken as it is. What is missing comes from the benchmark that the task's name begins with
  (:data:`~dasc.eval.items.families.FAMILIES`); the task is the file's name unless said.
- a conversation with questions, as LoCoMo's: ``{"conversation", "qa": [{"question", "answer"}, ..]}``. Each question
  is an item, since it is the unit of the statistics; all have the conversation as their warm prompt.
- an item as :func:`item_line` writes it.

Other keys are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from dasc.eval.items.conversation import conversation_text
from dasc.eval.items.families import Family, Kind, default_replays, family_of
from dasc.eval.items.final_answer import check_math_verify
from dasc.eval.items.item import Ask, Item, Text
from dasc.eval.items.scoring import SCORERS

LETTERS = "ABCDEFGHIJ"
"""Of choices, as many as MMLU-Pro has."""

SCORER_OF: dict[Kind, str] = {
    "choice": "choice",
    "final_answer": "final_answer",
    "expression": "expression",
    "f1": "token_f1",
    "match": "string_match_part",
    "match_all": "string_match_all",
    "exact": "exact",
}

INSTRUCTIONS: dict[Kind, str] = {
    "choice": 'Think step by step. End with the line "The answer is (X)", where X is the letter of your choice.',
    "final_answer": "Think step by step. Put your final answer, and nothing else, in \\boxed{}.",
    "expression": "Think step by step. Put your final answer, and nothing else, in \\boxed{}.",
    "f1": "Answer with a few words.",
}

OTHER_FAMILY_TOKENS: dict[Kind, int] = {"choice": 8192, "final_answer": 32_768, "expression": 32_768, "f1": 64}
SHORT_ANSWER_TOKENS = 128

NOT_MENTIONED = "Not mentioned in the conversation"
"""Right answer to a question that a conversation does not answer: one with an ``"adversarial_answer"`` only."""


def read_items(path: Path) -> list[Item]:
    """All items of a file, each task's together.

    Raises:
        ValueError: naming the file and the line, for a line that is none of the three or an id that a task has twice;
            naming the file, for one without items.
        ImportError: for items of kind ``expression`` without math-verify.
        OSError: when the file cannot be read.
    """
    items: list[Item] = []
    ids: set[tuple[str, str]] = set()
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                for item in _items(line, path.stem, number):
                    if (item.task, item.item_id) in ids:
                        raise ValueError(f"task {item.task!r} has an item with the id {item.item_id!r} already")
                    ids.add((item.task, item.item_id))
                    items.append(item)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from error
    if not items:
        raise ValueError(f"{path}: expected items, one a line, found none")
    if any(item.scorer == "expression" for item in items):  # better now than after hours
        check_math_verify()
    tasks = list(dict.fromkeys(item.task for item in items))
    return sorted(items, key=lambda item: tasks.index(item.task))


def item_line(item: Item) -> bytes:
    """An item as a line of JSON, for :func:`read_items`. A prompt is ``"warm"`` and then the ``"continuation"``."""
    value = {
        "id": item.item_id,
        "task": item.task,
        "scorer": item.scorer,
        "max_new_tokens": item.max_new_tokens,
        "replays": item.replays,
        "choices": item.choices,
        "warm": item.warm,
        "asks": [{"continuation": ask.prompt[len(item.warm) :], "references": ask.references} for ask in item.asks],
    }
    return (json.dumps(value, ensure_ascii=False) + "\n").encode()


def _items(line: bytes, default_task: str, number: int) -> Iterator[Item]:
    try:
        value = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"expected a JSON object, got broken JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got a {type(value).__name__}")
    task = _string(value, "task", default_task)
    item_id = value.get("id", str(number))
    if not isinstance(item_id, str | int) or isinstance(item_id, bool):
        raise ValueError(f"id must be text or a number, got {item_id!r}")
    if "asks" in value:
        yield _exported(value, task, str(item_id))
    elif "qa" in value:
        yield from _about_conversation(value, task if "task" in value else "locomo", str(item_id))
    else:
        yield _question(value, task, str(item_id))


def _exported(value: dict[str, Any], task: str, item_id: str) -> Item:
    warm = _text(value.get("warm"), "warm")
    asks = []
    for i, ask in enumerate(_list(value, "asks")):
        if not isinstance(ask, dict):
            raise ValueError(f"asks[{i}] must be an object, got a {type(ask).__name__}")
        continuation = _text(ask.get("continuation"), f"asks[{i}].continuation")
        if type(continuation) is not type(warm):
            raise ValueError(f"asks[{i}].continuation must be text or token ids, as warm is")
        references = tuple(_text(r, f"asks[{i}].references") for r in _list(ask, "references"))
        asks.append(Ask(warm + continuation, references))  # type: ignore[operator]  # both are of one type
    scorer = _string(value, "scorer")
    if scorer not in SCORERS:
        raise ValueError(f"scorer must be one of {', '.join(SCORERS)}, got {scorer!r}")
    choices = tuple(str(letter) for letter in value.get("choices") or ())
    tokens = _number(value, "max_new_tokens", None)
    return Item(item_id, task, warm, tuple(asks), scorer, tokens, choices, _number(value, "replays", 1))


def _question(value: dict[str, Any], task: str, item_id: str) -> Item:
    family = family_of(task)
    choices = _list(value, "choices") if "choices" in value else []
    kind = _kind(value, family, bool(choices))
    if ("question" in value) == ("prompt" in value):
        raise ValueError("expected either 'question', to be put into a prompt, or 'prompt', to be taken as it is")
    answers = _answers(value)
    letters: tuple[str, ...] = ()
    options = ""
    if kind == "choice":
        texts = [_answer_text(choice, "choices") for choice in choices]
        if not 2 <= len(texts) <= len(LETTERS):
            raise ValueError(f"choices must be 2 to {len(LETTERS)}, got {len(texts)}")
        letters = tuple(LETTERS[: len(texts)])
        answers = tuple(_letter(answer, texts) for answer in answers)
        options = "\n\n" + "\n".join(f"({letter}) {text}" for letter, text in zip(letters, texts))
    if "prompt" in value:
        prompt = _string(value, "prompt")
    else:
        instruction = INSTRUCTIONS.get(kind)
        prompt = _string(value, "question") + options + (f"\n\n{instruction}" if instruction else "")
    return Item(
        item_id,
        task,
        prompt,
        (Ask(prompt, answers),),
        SCORER_OF[kind],
        _number(value, "max_new_tokens", _answer_tokens(kind, family)),
        letters,
        _number(value, "replays", default_replays(task)),
    )


def _about_conversation(value: dict[str, Any], task: str, item_id: str) -> Iterator[Item]:
    family = family_of(task)
    kind = _kind(value, family, with_choices=False) if "kind" in value or family else "f1"
    warm = (
        f"{conversation_text(value.get('conversation'))}\n\n"
        f'Answer each question about the conversation above with a few words, or with "{NOT_MENTIONED}".\n\n'
    )
    for i, entry in enumerate(_list(value, "qa")):
        try:
            if not isinstance(entry, dict):
                raise ValueError(f"expected an object, got a {type(entry).__name__}")
            unanswered = "adversarial_answer" in entry and "answer" not in entry and "answers" not in entry
            answers = (NOT_MENTIONED,) if unanswered else _answers(entry)
            ask = Ask(f"{warm}Question: {_string(entry, 'question')}\nAnswer:", answers)
        except ValueError as error:
            raise ValueError(f"qa[{i}]: {error}") from error
        yield Item(
            f"{item_id}-{i}",
            task,
            warm,
            (ask,),
            SCORER_OF[kind],
            _number(value, "max_new_tokens", _answer_tokens(kind, family)),
            replays=_number(value, "replays", default_replays(task)),
        )


def _kind(value: dict[str, Any], family: Family | None, with_choices: bool) -> Kind:
    kinds = get_args(Kind)
    kind = value.get("kind", "choice" if with_choices else family and family.kind)
    if kind is None:
        raise ValueError(f"kind must be one of {', '.join(kinds)}: the task belongs to no benchmark known here")
    if kind not in kinds:
        raise ValueError(f"kind must be one of {', '.join(kinds)}, got {kind!r}")
    found: Kind = kind
    return found


def _answer_tokens(kind: Kind, family: Family | None) -> int:
    if family and family.kind == kind:
        return family.max_new_tokens
    return OTHER_FAMILY_TOKENS.get(kind, SHORT_ANSWER_TOKENS)


def _answers(value: dict[str, Any]) -> tuple[str, ...]:
    if ("answer" in value) == ("answers" in value):
        raise ValueError("expected either 'answer' or 'answers'")
    given = [value["answer"]] if "answer" in value else _list(value, "answers")
    return tuple(_answer_text(answer, "answer") for answer in given)


def _answer_text(answer: object, name: str) -> str:
    """Text as it is, numbers as JSON writes them."""
    if isinstance(answer, bool) or not isinstance(answer, str | int | float) or answer == "":
        raise ValueError(f"{name} must be text or a number, got {answer!r}")
    return str(answer)


def _letter(answer: str, choices: list[str]) -> str:
    """A letter stays; the text of exactly one choice becomes its letter."""
    if len(answer) == 1 and answer in LETTERS[: len(choices)]:
        return answer
    if choices.count(answer) != 1:
        last = LETTERS[len(choices) - 1]
        raise ValueError(f"answer must be a letter from A to {last} or the text of one choice, got {answer!r}")
    return LETTERS[choices.index(answer)]


def _string(value: dict[str, Any], key: str, default: str | None = None) -> str:
    text = value.get(key, default)
    if not isinstance(text, str) or not text:
        raise ValueError(f"{key} must be text, got {text!r}")
    return text


def _number(value: dict[str, Any], key: str, default: int | None) -> int:
    number = value.get(key, default)
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"{key} must be a whole number, at least 1, got {number!r}")
    return number


def _list(value: dict[str, Any], key: str) -> list[Any]:
    entries = value.get(key)
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{key} must be a list that is not empty, got {entries!r:.80}")
    return entries


def _text(value: object, name: str) -> Text:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(token) is int and token >= 0 for token in value):
        return tuple(value)
    raise ValueError(f"{name} must be text or a list of token ids, got {value!r:.80}")
