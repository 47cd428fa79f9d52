"""Users' own items: every benchmark's style, exported items, and errors that say where."""

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dasc.eval.items import SCORERS, Ask, Item, default_replays, item_line, read_items
from dasc.eval.items.jsonl import NOT_MENTIONED


def write(folder: Path, *lines: object, name: str = "own.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def read_one(folder: Path, **line: object) -> Item:
    (item,) = read_items(write(folder, line))
    return item


def score(item: Item, answer: str) -> float:
    return SCORERS[item.scorer](item, item.asks[0], answer)


@pytest.mark.parametrize(
    ("task", "replays"),
    [
        ("AIME 2026", 31),
        ("aime2026", 31),
        ("HMMT 2026 Feb", 31),
        ("IMOAnswerBench", 3),
        ("IMO-AnswerBench", 3),
        ("GPQA-Diamond", 15),
        ("MMLU-Pro", 7),
        ("mmlu_pro/physics", 7),
        ("LoCoMo", 1),
        ("ruler/4096/vt", 3),
        ("parity", 1),
        ("MMLU", 1),
    ],
)
def test_tasks_are_replayed_as_often_as_the_paper_replays_them(task: str, replays: int, tmp_path: Path):
    assert default_replays(task) == replays
    assert read_one(tmp_path, task=task, kind="f1", question="q", answer="a").replays == replays
    assert read_one(tmp_path, task=task, kind="f1", question="q", answer="a", replays=5).replays == 5


def test_an_aime_question_asks_for_a_box_and_takes_the_number(tmp_path: Path):
    item = read_one(tmp_path, id=7, task="AIME 2026", question="What is 6 * 7?", answer=42)
    assert (item.item_id, item.task, item.scorer) == ("7", "AIME 2026", "final_answer")
    assert item.warm == item.asks[0].prompt
    assert item.warm.startswith("What is 6 * 7?\n\n")
    assert "\\boxed{}" in item.warm
    assert "42" not in item.warm
    assert score(item, "It is \\boxed{042}.") == 1
    assert score(item, "It is \\boxed{41}, not 42.") == 0


def test_an_imo_question_takes_equal_expressions(tmp_path: Path):
    item = read_one(tmp_path, task="IMO-AnswerBench", question="q", answer="2^{10}")
    assert score(item, "\\boxed{1024}") == 1
    assert score(item, "\\boxed{1025}") == 0


def test_choices_are_lettered_and_the_answer_is_a_letter_or_the_text_of_one(tmp_path: Path):
    for answer in ("C", "blue"):
        item = read_one(tmp_path, task="gpqa", question="Which?", choices=["red", "green", "blue"], answer=answer)
        assert "Which?\n\n(A) red\n(B) green\n(C) blue\n\n" in item.warm
        assert '"The answer is (X)"' in item.warm
        assert item.choices == ("A", "B", "C")
        assert score(item, "The answer is (C).") == 1
        assert score(item, "The answer is (B).") == 0
        assert score(item, "The answer is (D).") == 0
    ten = read_one(tmp_path, task="MMLU-Pro", question="q", choices=list(range(10)), answer="J")
    assert ten.choices == tuple("ABCDEFGHIJ")
    assert score(ten, "The answer is (J).") == 1


def test_a_prompt_is_taken_as_it_is(tmp_path: Path):
    item = read_one(tmp_path, prompt="Say it.\n", answers=["a", "b"], kind="match", max_new_tokens=9)
    assert (item.warm, item.max_new_tokens, item.task, item.item_id) == ("Say it.\n", 9, "own", "1")
    assert score(item, "so B it is") == 1
    all_of_them = read_one(tmp_path, prompt="Say it.", answers=["a", "b"], kind="match_all")
    assert score(all_of_them, "b") == 0.5


def test_kinds_name_scorers(tmp_path: Path):
    kinds = ["final_answer", "expression", "f1", "match", "match_all", "exact"]
    scorers = {kind: read_one(tmp_path, question="q", answer="a", kind=kind).scorer for kind in kinds}
    assert set(scorers.values()) == set(SCORERS) - {"choice"}


def test_a_conversation_gives_an_item_for_each_question_with_one_warm_prompt(tmp_path: Path):
    conversation = {
        "speaker_a": "Ada",
        "session_10": [{"speaker": "Ada", "text": "Look!", "blip_caption": "a red boat"}],
        "session_2": [{"speaker": "Ben", "text": "I moved."}],
        "session_2_date_time": "1 May 2023",
    }
    qa = [
        {"question": "Who moved?", "answer": "Ben", "category": 1},
        {"question": "When?", "answer": 2023},
        {"question": "Why?", "adversarial_answer": "For a job"},
    ]
    items = read_items(write(tmp_path, {"id": "c", "conversation": conversation, "qa": qa}))
    assert [item.item_id for item in items] == ["c-0", "c-1", "c-2"]
    assert {(item.task, item.scorer, item.replays) for item in items} == {("locomo", "token_f1", 1)}
    assert {item.warm for item in items} == {items[0].warm}
    text = "Session 2, 1 May 2023:\nBen: I moved.\n\nSession 10:\nAda: Look! [shares a picture: a red boat]\n"
    assert items[0].warm.startswith(text)
    assert [item.asks[0].prompt.removeprefix(item.warm) for item in items] == [
        "Question: Who moved?\nAnswer:",
        "Question: When?\nAnswer:",
        "Question: Why?\nAnswer:",
    ]
    assert [item.asks[0].references for item in items] == [("Ben",), ("2023",), (NOT_MENTIONED,)]
    assert score(items[0], "It was Ben") == pytest.approx(0.5)
    turns = [{"speaker": "Ben", "text": "I moved."}]
    for form, expected in ((turns, "Ben: I moved.\n"), ("Ben moved.", "Ben moved.\n")):
        (item,) = read_items(write(tmp_path, {"conversation": form, "qa": qa[:1], "task": "LoCoMo-own"}))
        assert item.warm.startswith(expected)
        assert item.task == "LoCoMo-own"


texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
ids = st.lists(st.integers(0, 999), min_size=1).map(tuple)


@given(st.data(), st.sampled_from([texts, ids]))
def test_exported_items_come_back_as_they_were(tmp_path_factory, data, parts):
    def item(number: int) -> Item:
        warm = data.draw(parts)
        asks = tuple(
            Ask(warm + data.draw(parts), tuple(data.draw(st.lists(parts, min_size=1))))
            for _ in range(data.draw(st.integers(1, 3)))
        )
        task = data.draw(st.sampled_from(["a", "b/ü"]))
        return Item(str(number), task, warm, asks, "exact", data.draw(st.integers(1, 99)), ("A", "B"), number + 1)

    items = sorted((item(number) for number in range(data.draw(st.integers(1, 3)))), key=lambda item: item.task)
    path = tmp_path_factory.mktemp("items") / "items.jsonl"
    path.write_bytes(b"".join(map(item_line, items)))
    assert read_items(path) == items


def test_items_of_a_task_follow_each_other(tmp_path: Path):
    lines = [{"id": i, "task": task, "kind": "f1", "question": "q", "answer": "a"} for i, task in enumerate("abab")]
    items = read_items(write(tmp_path, *lines, ""))
    assert [(item.task, item.item_id) for item in items] == [("a", "0"), ("a", "2"), ("b", "1"), ("b", "3")]


GOOD = {"task": "aime", "question": "q", "answer": "1"}
ASK = {"continuation": "c", "references": ["r"]}
EXPORTED = {"id": "e", "task": "t", "warm": "w", "asks": [ASK], "scorer": "exact", "max_new_tokens": 4}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "broken JSON"),
        ("[1]", "expected a JSON object, got a list"),
        ({"question": "q", "answer": "a"}, "kind must be one of .* no benchmark known here"),
        (GOOD | {"kind": "guess"}, "kind must be one of .*, got 'guess'"),
        (GOOD | {"prompt": "p"}, "either 'question'.* or 'prompt'"),
        ({"task": "aime", "answer": "1"}, "either 'question'.* or 'prompt'"),
        ({"task": "aime", "question": "q"}, "either 'answer' or 'answers'"),
        (GOOD | {"answers": ["1"]}, "either 'answer' or 'answers'"),
        ({"task": "aime", "question": "q", "answers": []}, r"answers must be a list that is not empty, got \[\]"),
        (GOOD | {"answer": None}, "answer must be text or a number, got None"),
        (GOOD | {"answer": True}, "answer must be text or a number, got True"),
        (GOOD | {"answer": ""}, "answer must be text or a number, got ''"),
        (GOOD | {"question": ""}, "question must be text, got ''"),
        (GOOD | {"id": 1.5}, "id must be text or a number, got 1.5"),
        (GOOD | {"task": 3}, "task must be text, got 3"),
        (GOOD | {"replays": 0}, "replays must be a whole number, at least 1, got 0"),
        (GOOD | {"max_new_tokens": "9"}, "max_new_tokens must be a whole number"),
        (GOOD | {"kind": "choice"}, "choices must be 2 to 10, got 0"),
        (GOOD | {"choices": ["x"] * 11, "kind": "choice"}, "choices must be 2 to 10, got 11"),
        (GOOD | {"choices": ["x", "y"], "kind": "choice", "answer": "C"}, "a letter from A to B or the text of one"),
        (GOOD | {"choices": ["x", "x"], "kind": "choice", "answer": "x"}, "a letter from A to B or the text of one"),
        ({"conversation": "c", "qa": [{"question": "q"}]}, r"qa\[0\]: expected either 'answer'"),
        ({"conversation": "c", "qa": ["q"]}, r"qa\[0\]: expected an object, got a str"),
        ({"conversation": {"a": 1}, "qa": [{"question": "q", "answer": "a"}]}, "conversation must be text"),
        ({"conversation": [], "qa": [{"question": "q", "answer": "a"}]}, "conversation must be a list"),
        ({"conversation": [{"speaker": "A"}], "qa": [1]}, r"conversation\[0\] must be an object with 'speaker'"),
        ({"conversation": {"session_1": 3}, "qa": [1]}, "conversation.session_1 must be a list"),
        (EXPORTED | {"scorer": "x"}, "scorer must be one of exact"),
        (EXPORTED | {"warm": [-1]}, "warm must be text or a list of token ids"),
        (EXPORTED | {"warm": [1]}, r"asks\[0\].continuation must be text or token ids, as warm is"),
        (EXPORTED | {"asks": [3]}, r"asks\[0\] must be an object, got a int"),
        (EXPORTED | {"asks": [ASK | {"references": []}]}, "references must be a list that is not empty"),
        (EXPORTED | {"max_new_tokens": None}, "max_new_tokens must be a whole number"),
    ],
)
def test_a_wrong_line_is_refused_by_file_and_line(line: object, message: str, tmp_path: Path):
    path = write(tmp_path, GOOD | {"id": "first"}, "", line)
    with pytest.raises(ValueError, match=message) as caught:
        read_items(path)
    assert str(caught.value).startswith(f"{path}:3: ")


def test_an_id_that_a_task_has_twice_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"own.jsonl:2: task 'aime' has an item with the id 'x' already"):
        read_items(write(tmp_path, GOOD | {"id": "x"}, GOOD | {"id": "x"}))
    assert len(read_items(write(tmp_path, GOOD | {"id": "x"}, GOOD | {"id": "x", "task": "aime-2"}))) == 2


def test_a_file_without_items_is_refused_by_name(tmp_path: Path):
    with pytest.raises(ValueError, match=r"own.jsonl: expected items"):
        read_items(write(tmp_path, "", ""))


def test_expressions_without_math_verify_are_refused_when_read_and_not_after_hours(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match=r"dasc\[math\]"):
        read_one(tmp_path, task="HMMT", question="q", answer="1")
    assert read_one(tmp_path, task="HMMT", kind="final_answer", question="q", answer="1").scorer == "final_answer"
