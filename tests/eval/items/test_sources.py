"""One function gives the items of every source."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from dasc.eval.items import item_line, load_items
from dasc.eval.items.ruler import SUBTASKS
from dasc.eval.items.sources import DEFAULT_LENGTHS, token_counter
from dasc.models.tasks import TASKS


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A tokenizer whose tokens are words."""
    words = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_ruler_is_all_subtasks_at_the_papers_lengths():
    assert DEFAULT_LENGTHS["ruler"] == (4096, 8192, 16_384)
    items = load_items("ruler", lengths=[8192, 6000], count=1)
    assert [item.task for item in items] == [f"ruler/{length}/{name}" for length in (8192, 6000) for name in SUBTASKS]


def test_depths_make_tasks_of_their_own():
    items = load_items("ruler", tasks=["niah_single_1"], lengths=[3000], count=2, depths=[0, 0.5])
    names = [f"ruler/3000/niah_single_1/depth-{percent}" for percent in (0, 50)]
    assert [item.task for item in items] == [name for name in names for _ in range(2)]


def test_lengths_are_counted_with_the_tokenizer_given(tokenizer: Path):
    for path in (tokenizer, tokenizer / "tokenizer.json"):
        assert token_counter(path)("two words") == 2
    assert token_counter(None)("zwei Wörter") == 12
    (item,) = load_items("ruler", tasks=["vt"], lengths=[2000], count=1, tokenizer=tokenizer)
    assert 1950 <= len(item.asks[0].prompt.split()) + item.max_new_tokens <= 2000


def test_tasks_are_those_of_the_bundled_models_in_token_ids():
    items = load_items("tasks", count=1)
    assert [item.task.split("/")[0] for item in items] == list(TASKS)
    assert all(isinstance(item.warm, tuple) for item in items)
    (parity,) = load_items("tasks", tasks=["parity"], lengths=[64], count=1)
    assert parity.task.startswith("parity")
    assert parity != load_items("tasks", tasks=["parity"], lengths=[64], count=1, seed=1)[0]


def test_a_file_gives_what_was_exported_or_a_part_of_it(tmp_path: Path):
    items = load_items("ruler", tasks=["vt", "fwe"], lengths=[3000], count=3)
    path = tmp_path / "items.jsonl"
    path.write_bytes(b"".join(map(item_line, items)))
    assert load_items(path) == load_items(str(path)) == items
    assert load_items(path, count=1) == [items[0], items[3]]
    assert load_items(path, tasks=["ruler/3000/fwe"]) == items[3:]
    with pytest.raises(ValueError, match=r"tasks must be of ruler/3000/vt, ruler/3000/fwe, those of .*, got 'x'"):
        load_items(path, tasks=["x"])


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("tasks", {"depths": [0.5]}, "depths must not be given for items of tasks"),
        ("tasks", {"tokenizer": Path("t")}, "tokenizer must not be given for items of tasks"),
        ("file.jsonl", {"lengths": [512]}, r"lengths must not be given for items of file\.jsonl"),
        ("ruler", {"count": 0}, "count must be >= 1, got 0"),
        ("ruler", {"tokenizer": Path("nowhere")}, r"tokenizer must be a tokenizer\.json or a folder with one"),
    ],
)
def test_options_that_a_source_does_not_have_are_refused(source: str, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        load_items(source, **options)
