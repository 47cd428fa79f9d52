"""What is replayed: frozen prompts from files and from the generator."""

import itertools
import json
import statistics
from pathlib import Path

import pytest
import tokenizers

from dasc.eval.chat_tokens import ByteTokens, FileTokens, chat_tokens
from dasc.eval.conversation_files import read_conversations
from dasc.eval.conversations import Limits, Message, Turn, conversation_turns, generate_conversations

BYTES = ByteTokens()
ALL = Limits()
SYSTEM, USER, ASSISTANT, END = 256, 257, 258, 259


def turns_of(*messages: tuple[str, object], limits: Limits = ALL, vocab_size: int = 260) -> list[Turn]:
    chat = [Message(role, content) for role, content in messages]
    return conversation_turns(chat, BYTES, limits, vocab_size)


def write(path: Path, *lines: object) -> Path:
    path.write_bytes(b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines))
    return path


def read(path: Path, limits: Limits = ALL, count: int | None = None) -> list[list[Turn]]:
    return read_conversations(path, BYTES, limits, 260, count)


def test_a_turn_is_everything_before_an_answer_and_as_many_tokens_as_that_has():
    turns = turns_of(("system", "S"), ("user", "hi"), ("assistant", "yes!"), ("user", "é"), ("assistant", ""))
    first = (SYSTEM, 83, END, USER, 104, 105, END, ASSISTANT)
    second = (*first, *b"yes!", END, USER, *"é".encode(), END, ASSISTANT)
    assert turns == [Turn(first, 4), Turn(second, 1)]  # at least one token is generated


def test_prompts_go_on_from_each_other_with_any_tokenizer(tmp_path: Path):
    """What makes prefixes shareable: text is turned into ids message by message."""
    tokens = FileTokens(save_tokenizer(tmp_path))
    chat = generate_conversations(1, turns=3, scale=1 / 64, seed=1)[0]
    for tokenizer in (BYTES, tokens):
        turns = conversation_turns(chat, tokenizer, Limits(), 300)
        for before, after in itertools.pairwise(turns):
            assert after.prompt[: len(before.prompt)] == before.prompt


def test_a_last_question_without_an_answer_is_a_turn_of_the_most_tokens():
    assert [t.answer_tokens for t in turns_of(("user", "a"), ("assistant", "bcd"), ("user", "e"))] == [3, 1024]
    limits = Limits(answer_tokens=2)
    assert [t.answer_tokens for t in turns_of(("user", "a"), ("assistant", "bcd"), ("user", "e"), limits=limits)] == [
        2,
        2,
    ]


def test_answers_to_nobody_are_context():
    turns = turns_of(("assistant", "hello"), ("user", "a"), ("user", "b"), ("assistant", "c"), ("assistant", "d"))
    assert len(turns) == 1
    assert bytes(t for t in turns[0].prompt if t < 256) == b"helloab"


def test_limits_take_the_first_turns_and_refuse_long_ones():
    chat = [("user", "aaaa"), ("assistant", "bb"), ("user", "cc"), ("assistant", "dd")]
    assert len(turns_of(*chat, limits=Limits(turns=1))) == 1
    assert len(turns_of(*chat, limits=Limits(turns=2, context_tokens=17))) == 2
    with pytest.raises(ValueError, match="turn 2 takes 17 tokens, the limit is 16"):
        turns_of(*chat, limits=Limits(turns=2, context_tokens=16))
    assert len(turns_of(*chat, limits=Limits(turns=1, context_tokens=16))) == 1


def test_token_ids_are_taken_as_they_are_and_checked():
    assert turns_of(("user", (1, 2)), ("assistant", (3,)))[0].prompt == (USER, 1, 2, END, ASSISTANT)
    for ids in ((260,), (-1,), (0, 10**12)):
        with pytest.raises(ValueError, match=r"token ids must be in \[0, 260\), got"):
            turns_of(("user", ids))


def test_a_chat_without_a_question_is_refused():
    for chat in ([], [("system", "a")], [("assistant", "a")]):
        with pytest.raises(ValueError, match="no user message"):
            turns_of(*chat)


# -- files ------------------------------------------------------------------------------------------------------------


def test_both_forms_of_a_file_are_read(tmp_path: Path):
    openai = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}], "id": 7}
    sharegpt = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}
    ids = {"messages": [{"role": "user", "content": [104, 105]}, {"role": "assistant", "content": [1, 2, 3]}]}
    path = write(tmp_path / "chats.jsonl", openai, b"", sharegpt, b"   ", ids)
    expected = [Turn((USER, 104, 105, END, ASSISTANT), 3)]
    assert read(path) == [expected] * 3
    assert read(path, count=2) == [expected] * 2


def test_what_apis_write_besides_plain_text_is_read(tmp_path: Path):
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    call = {"role": "assistant", "content": None, "tool_calls": []}
    chat = [{"role": "developer", "content": "s"}, {"role": "user", "content": parts}, call]
    chat += [{"role": "tool", "content": "x"}, {"role": "assistant", "content": "yes"}]
    [[first, second]] = read(write(tmp_path / "chats.jsonl", {"messages": chat}))
    assert bytes(t for t in first.prompt if t < 256) == b"shi"
    assert bytes(t for t in second.prompt if t < 256) == b"shix"


GOOD = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"messages": [', "broken JSON"),
        (b"\xff\xfe", "broken JSON"),
        (b"[" * 100_000, "broken JSON"),
        ([1], "expected an object with a list of either 'messages' or 'conversations'"),
        ({}, "expected an object with a list"),
        ({"messages": "hi"}, "expected an object with a list"),
        ({"messages": [], "conversations": []}, "expected an object with a list of either"),
        ({"messages": []}, "expected at least one entry in 'messages', got none"),
        ({"messages": ["hi"]}, r"messages\[0\] must be an object, got a str"),
        ({"messages": [{"content": "hi"}]}, r"messages\[0\].role must be one of system, user.*, got None"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, r"messages\[0\].role must be one of .*, got 'robot'"),
        ({"messages": [{"role": ["user"], "content": "hi"}]}, r"messages\[0\].role must be"),
        (
            {"messages": [GOOD["messages"][0], {"role": "assistant"}]},
            r"messages\[1\].content must be text, text parts or a list",
        ),
        (
            {"messages": [{"role": "user", "content": [1, True]}]},
            r"messages\[0\].content must be text, text parts or a list",
        ),
        ({"conversations": [{"from": "human", "content": "hi"}]}, r"conversations\[0\].value must be text"),
        ({"messages": [{"role": "user", "content": [999]}]}, r"token ids must be in \[0, 260\), got 999 to 999"),
        ({"messages": [{"role": "system", "content": "hi"}]}, "no user message"),
        ({"messages": [{"role": "user", "content": "a" * 200}]}, "turn 1 takes 204 tokens, the limit is 50"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogates not allowed"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_line(tmp_path: Path, line: object, message: str):
    path = write(tmp_path / "chats.jsonl", GOOD, b"", line, GOOD)
    with pytest.raises(ValueError, match=message) as caught:
        read(path, Limits(answer_tokens=1, context_tokens=50))
    assert str(caught.value).startswith(f"{path}:3: ")
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("data", [b"", b"\n\n  \n"])
def test_a_file_without_conversations_is_refused(tmp_path: Path, data: bytes):
    path = tmp_path / "chats.jsonl"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"chats.jsonl: expected conversations, one a line, found none"):
        read(path)


# -- tokenizers -------------------------------------------------------------------------------------------------------


def save_tokenizer(folder: Path) -> Path:
    model = tokenizers.models.BPE({chr(i): i for i in range(32, 127)} | {"th": 127}, [("t", "h")])
    tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_a_models_own_tokenizer_is_used(tmp_path: Path):
    assert isinstance(chat_tokens(tmp_path, 260), ByteTokens)
    save_tokenizer(tmp_path)
    tokens = chat_tokens(tmp_path, 128)
    assert tokens.vocabulary == 128
    assert tokens.text("thx") == [127, ord("x")]
    assert tokens.head("user") == [ord(c) for c in "user: "]


def test_vocabularies_beyond_the_models_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"byte tokenizer .* has 260 ids, but the model has 259"):
        chat_tokens(tmp_path, 259)
    save_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer.json has 128 ids, but the model has 127"):
        chat_tokens(tmp_path, 127)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer.json: cannot be read as a tokenizer"):
        chat_tokens(tmp_path, 500)


def test_without_the_tokenizers_package_the_error_says_what_to_install(tmp_path: Path, monkeypatch):
    save_tokenizer(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(ImportError, match="pip install tokenizers"):
        chat_tokens(tmp_path, 500)


# -- the generator ----------------------------------------------------------------------------------------------------


def test_the_generator_depends_on_its_arguments_alone():
    same = generate_conversations(5, scale=1 / 64, seed=3)
    assert same == generate_conversations(5, scale=1 / 64, seed=3)
    assert same != generate_conversations(5, scale=1 / 64, seed=4)
    assert all(len(chat) in (8, 9) for chat in same)


def test_made_up_chats_have_lengths_like_those_of_wildchat():
    chats = generate_conversations(200, scale=1.0, seed=0)
    firsts = [next(len(m.content) for m in chat if m.role == "user") for chat in chats]
    assert 1024 <= min(firsts) < max(firsts) <= 8192
    assert 1800 < statistics.median(firsts) < 3300
    later = [len(m.content) for chat in chats for m in [m for m in chat if m.role == "user"][1:]]
    answers = [len(m.content) for chat in chats for m in chat if m.role == "assistant"]
    assert max(later) <= 1024
    assert max(answers) <= 1024
    assert 200 < statistics.mean(later) < 300  # 296 before the cap
    assert 370 < statistics.mean(answers) < 450
    longest = max(len(conversation_turns(chat, BYTES, Limits(), 260)[-1].prompt) for chat in chats)
    assert longest < 16_384


def test_two_chats_in_five_share_a_system_prompt():
    systems = [chat[0].content for chat in generate_conversations(300, scale=1 / 64) if chat[0].role == "system"]
    assert 90 < len(systems) < 150
    assert len(set(systems)) == 4


@pytest.mark.parametrize("arguments", [{"count": 0}, {"turns": 0}, {"scale": 0.0}, {"scale": float("nan")}])
def test_chats_that_cannot_be_made_are_refused(arguments: dict):
    with pytest.raises(ValueError, match="count and turns must be >= 1 and scale positive"):
        generate_conversations(**{"count": 1, **arguments})
