"""Appendix A.2's choice of prefixes, on a list small enough to choose by hand."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from dasc.eval.horizons import Prefix, read_sharegpt, select_prefixes, sharegpt


def text(tokens: int, characters: int) -> str:
    """Text of so many characters that is encoded as the ids ``0 .. tokens - 1``."""
    return "|" * tokens + " " * (characters - tokens)


def encode(content: str) -> list[int]:
    return list(range(content.count("|")))


# By hand, for targets of 4 tokens (14 characters) and of 2 (7 characters).
TEXTS = [
    text(10, 13),  # 0: a character short of the first target
    text(9, 20),  # 1
    text(5, 14),  # 2: exactly enough characters
    text(3, 30),  # 3: enough characters, but few tokens
    text(5, 16),  # 4: as long as 2
    text(2, 7),  # 5
    text(6, 6),  # 6: too short for any
]


def chosen(prefixes: Sequence[Prefix]) -> list[tuple]:
    return [(p.target, p.source, p.tokens, p.available) for p in prefixes]


@pytest.mark.parametrize("targets", [(4, 2), (2, 4)])
def test_the_shortest_that_are_long_enough_are_taken_and_lose_their_beginning(targets: tuple[int, ...]):
    assert chosen(select_prefixes(TEXTS, encode, targets, 2)) == [
        (4, 2, (1, 2, 3, 4), 5),
        (4, 4, (1, 2, 3, 4), 5),
        (2, 5, (0, 1), 2),
        (2, 3, (1, 2), 3),
    ]


def test_when_too_few_are_long_enough_the_longest_there_are_stand_in():
    """The first target has three of four and takes one that is shorter; the second finds two left."""
    assert chosen(select_prefixes(TEXTS, encode, (4, 2), 4)) == [
        (4, 3, (0, 1, 2), 3),
        (4, 2, (1, 2, 3, 4), 5),
        (4, 4, (1, 2, 3, 4), 5),
        (4, 1, (5, 6, 7, 8), 9),
        (2, 5, (0, 1), 2),
        (2, 0, (8, 9), 10),
    ]


def test_the_longest_stand_in_even_when_shorter_ones_come_first_in_the_file():
    texts = [text(tokens, 40) for tokens in (1, 3, 2, 3)]
    assert [p.source for p in select_prefixes(texts, encode, (4,), 2)] == [1, 3]
    assert [p.source for p in select_prefixes([*texts, text(8, 40)], encode, (4,), 2)] == [3, 4]


def test_only_the_first_eligible_are_candidates(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sharegpt, "CANDIDATES", 2)
    encoded = []

    def counted(content: str) -> list[int]:
        encoded.append(TEXTS.index(content))
        return encode(content)

    found = select_prefixes(TEXTS, counted, (4, 2), 2)
    assert [p.source for p in found] == [2, 1, 3, 0]
    assert encoded == [1, 2, 0, 3]


def test_the_papers_numbers():
    assert (sharegpt.TARGETS, sharegpt.CANDIDATES) == ((16_384, 8_192, 4_096, 1_024), 500)
    many = [text(1_024 + i, 3_584) for i in range(501)][::-1]
    found = select_prefixes(many, encode, (1_024,))
    assert [p.source for p in found] == list(range(499, 491, -1))  # number 500, the shortest, is no candidate


@pytest.mark.parametrize(
    ("texts", "targets", "count", "message"),
    [
        (TEXTS, (), 1, "targets and per_target must be >= 1"),
        (TEXTS, (4, 0), 1, "targets and per_target must be >= 1"),
        (TEXTS, (4,), 0, "targets and per_target must be >= 1"),
        (TEXTS, (100,), 1, "no conversation has the 350 characters that 100 tokens need"),
    ],
)
def test_wrong_wishes_are_refused(texts: list[str], targets: tuple[int, ...], count: int, message: str):
    with pytest.raises(ValueError, match=message):
        select_prefixes(texts, encode, targets, count)


def test_conversations_become_blocks_of_user_and_assistant(tmp_path: Path):
    path = tmp_path / "sharegpt.json"
    turns = [("system", "Be brief."), ("human", " Hi \n"), ("gpt", "Hello."), ("user", "Bye"), ("chatgpt", "Bye.")]
    values = [{"id": "a", "conversations": [{"from": f, "value": v} for f, v in turns]}, {"conversations": []}]
    path.write_text(json.dumps(values))
    assert read_sharegpt(path) == ["User: Hi\n\nAssistant: Hello.\n\nUser: Bye\n\nAssistant: Bye.", ""]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "broken JSON"),
        ("{}", "expected a JSON array of conversations, got dict"),
        ("[]", "expected a JSON array of conversations, got list"),
        ('[{"conversations": []}, {"messages": []}]', "conversation 1 must be"),
        ("[3]", "conversation 0 must be"),
        ('[{"conversations": [{"from": "human", "value": null}]}]', "conversation 0 must be"),
        ('[{"conversations": [{"value": "x"}]}]', "conversation 0 must be"),
    ],
)
def test_other_files_are_refused_by_name_and_index(tmp_path: Path, content: str, message: str):
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as raised:
        read_sharegpt(path)
    assert str(path) in str(raised.value)
