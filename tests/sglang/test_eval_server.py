"""A quality evaluation of SGLang's real server: what it reports, keeps and evicts is what the protocol counts."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from dasc.eval.items import Ask, Item
from dasc.eval.quality.arms import ArmSpec
from dasc.eval.quality.http import Http
from dasc.eval.quality.protocol import Controls, Protocol
from dasc.eval.quality.results import TaskResult
from dasc.eval.quality.runs import run_server
from dasc.eval.quality.server_backend import ServerBackend
from tests.sglang import runs
from tests.sglang.engines import ARGUMENTS
from tests.sglang.servers import served
from tests.sglang.tiny_models import VOCAB

POOL = 24
ARM = ArmSpec("nr", runs.W_MAX)
PROTOCOL = Protocol(block_items=8, slots=None, concurrency=3, replays=2)


def add_tokenizer(folder: Path) -> Path:
    """Ids from 3 on are the words ``w3``, ``w4`` and so on."""
    special = ("<unk>", "<eos>", "<pad>")
    words = {special[i] if i < len(special) else f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("eval-server")
    model = add_tokenizer(shutil.copytree(runs.model("kimi-linear"), folder / "tiny"))
    arguments = {name: value for name, value in ARGUMENTS.items() if name != "skip_tokenizer_init"}
    env = {"DASC_PLAN": "auto", "DASC_W_MAX": str(runs.W_MAX), "DASC_POOL": str(POOL)}
    with served(model, folder / "log.txt", env, {**arguments, "enable_cache_report": True}) as address:
        yield address


def tokens(seed: int, count: int = 20) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, VOCAB, count).tolist())


def words(ids: tuple[int, ...]) -> str:
    return " ".join(f"w{i}" for i in ids)


def token_items(count: int, more: tuple[int, ...] = (9, 8, 7)) -> list[Item]:
    return [Item(f"{i}", "ids", tokens(i), (Ask(tokens(i) + more, (tokens(i),)),), "exact", 4) for i in range(count)]


def text_items(count: int) -> list[Item]:
    """The same prompts in words."""
    return [
        Item(i.item_id, "text", words(i.warm), (Ask(words(i.asks[0].prompt), ("w3",)),), "exact", 4)
        for i in token_items(count)
    ]


def measure(url: str, items: list[Item], protocol: Protocol = PROTOCOL) -> tuple[TaskResult, dict, tuple[str, ...]]:
    """The only task, its only block, and the arm's failures."""
    [arm] = run_server(items, ServerBackend(Http(url, tries=1)), ARM, protocol).arms
    [task], [block] = arm.tasks.values(), arm.blocks
    return task, block, arm.failures


def test_measured_prompts_hit_exactly_what_was_warmed_by_ids_and_by_text(url: str):
    """And nothing is evicted: the pool has a slot for each prefix and for what SGLang keeps of measured requests."""
    protocol = dataclasses.replace(PROTOCOL, controls=Controls(min_available_slots=POOL - 3))
    for items in (token_items(3), text_items(3)):
        task, block, failures = measure(url, items, protocol)
        assert (task.requests, task.cached_tokens, task.new_tokens) == (6, 6 * 20, 6 * 3)
        assert (block["available_slots"], block["evictions"]) == (POOL - 3, 0)
        assert failures == ()
        assert task.ttft_mean_s > 0


def test_prompts_warmed_exactly_hit_all_but_their_last_token_by_ids(url: str):
    task, _, _ = measure(url, token_items(3, more=()))
    assert (task.cached_tokens, task.new_tokens) == (6 * 19, 6)


def test_prompts_warmed_exactly_miss_by_text_where_states_are_only_at_the_ends(url: str):
    """As docs/quality.md says of this strategy."""
    items = [dataclasses.replace(i, asks=(Ask(i.warm, ("w3",)),)) for i in text_items(2)]
    task, _, _ = measure(url, items)
    assert (task.cached_tokens, task.loaded) == (0, 0)


def test_evictions_while_replaying_are_seen(url: str):
    """Eight prefixes, and two states more of each of the sixteen measured requests: too many for the pool."""
    items = [dataclasses.replace(i, asks=(*i.asks, Ask((*i.warm, 4, 5), ((1,),)))) for i in token_items(8)]
    protocol = dataclasses.replace(PROTOCOL, controls=Controls(min_available_slots=1))
    _, block, failures = measure(url, items, protocol)
    assert block["available_slots"] == POOL - 8
    assert block["evictions"] > 0
    assert any("evictions while replaying" in failure for failure in failures)


def test_equal_runs_give_equal_answers(url: str):
    """Each begins with an empty cache, whatever was there before."""
    first, second = (measure(url, token_items(2))[0] for _ in range(2))
    assert dataclasses.replace(first, ttft_mean_s=None) == dataclasses.replace(second, ttft_mean_s=None)


def test_the_server_says_what_it_is(url: str):
    settings = ServerBackend(Http(url)).settings()
    assert settings["compressed_slots"] == POOL
    assert (settings["version"], settings["tp_size"]) == ("0.5.23", 1)
    assert settings["mamba_radix_cache_strategy"] == "no_buffer"
