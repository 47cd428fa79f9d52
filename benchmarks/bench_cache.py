"""Cost of the cache's host logic: operations a second under pressure, growth with the size of the tree, memory a node.

    pytest benchmarks/bench_cache.py

One *cycle* is what a server does to the cache for a request: match the prompt, make room for it (evicting what was used
longest ago, KV and state), insert it with its state. The prompts are ready-made arrays of token ids, as a tokenizer
would hand them over.
"""

import gc
import time
import tracemalloc

import numpy as np
import pytest

from dasc.cache import CacheConfig, InlineMover, PrefixCache, check, encode_tokens

pytestmark = pytest.mark.benchmark(timer=time.process_time)  # one thread of host work; other programs do not count

PROMPT_TOKENS = 2000
SHARED_TOKENS = 1000
SHORT_TOKENS = 16
VOCABULARY = 150_000


class NoData:
    """Moves nothing: only the host's work is timed."""

    def pack(self, native_slot, compressed_slot):
        pass

    def copy(self, pairs):
        pass

    def load(self, compressed_slot, active_slot, position):
        pass

    def clear(self, slots):
        pass


class Prompts:
    """An endless supply of prompts in groups that share their first ``shared`` tokens."""

    def __init__(self, tokens: int, shared: int, groups: int) -> None:
        self.rng = np.random.default_rng(0)
        self.heads = self.rng.integers(0, VOCABULARY, (groups, shared), dtype=np.int32)
        self.tail_tokens = tokens - shared

    def take(self, count: int) -> list[np.ndarray]:
        tails = self.rng.integers(0, VOCABULARY, (count, self.tail_tokens), dtype=np.int32)
        groups = self.rng.integers(0, len(self.heads), count)
        return [np.concatenate([self.heads[g], tail]) for g, tail in zip(groups, tails)]


def cycle(cache: PrefixCache, prompt: np.ndarray) -> int:
    """Match, make room, insert; returns how many tokens were there already. The prompt must be new."""
    ledger = cache.ledger
    tree, page = ledger.tree, ledger.page_size
    key = encode_tokens(prompt)
    key = key[: len(key) // (4 * page) * 4 * page]
    tree.match(key)
    pages = ledger.allocate_pages(len(key) // 4 // page)
    slot = ledger.store.allocate("request")
    entry = ledger.store.adopt(slot, "request", len(key) // 4)
    node, existing = tree.insert(key, pages)
    ledger.kv.free(pages[: existing // page * 4])
    node.state, entry.owner = entry, node
    return existing


def request(cache: PrefixCache, number: int, prompt: np.ndarray) -> None:
    """The same through the front door: admission, loads, checkpoints at junctions, end."""
    cache.step()
    cache.acquire(number, prompt)
    cache.issue_loads()
    end = len(prompt) // cache.config.page_size * cache.config.page_size
    while (stop := cache.next_stop(number)) is not None and stop <= end:
        cache.advance(number, stop)
        cache.checkpoint(number, stop)
    cache.advance(number, end)
    cache.finish(number)


def build(page: int, states: int, tokens: int, **options) -> PrefixCache:
    """A cache with KV for ``states`` prompts, dense unless told otherwise."""
    options = {"native_slots": states + 8, "compressed_slots": 0} | options
    config = CacheConfig(kv_pages=states * -(-tokens // page), page_size=page, explain_records=64, **options)
    return PrefixCache(config, InlineMover(NoData()))


def measure(benchmark, supply: Prompts, count: int, act) -> None:
    """Time ``act`` on fresh prompts, ``count`` a round."""
    benchmark.pedantic(
        lambda batch: [act(prompt) for prompt in batch],
        setup=lambda: ((supply.take(count),), {}),
        rounds=7,
        warmup_rounds=2,
    )
    if benchmark.stats is not None:  # None when benchmarks are only tried out
        benchmark.extra_info["us_each"] = round(benchmark.stats["median"] / count * 1e6, 1)
        benchmark.extra_info["per_second"] = round(count / benchmark.stats["median"])


@pytest.mark.parametrize("page", [1, 64])
def test_cycles_under_pressure(benchmark, page):
    cache = build(page, 100, PROMPT_TOKENS, native_slots=400)
    existing: list[int] = []
    supply = Prompts(PROMPT_TOKENS, SHARED_TOKENS, 20)
    measure(benchmark, supply, 200, lambda prompt: existing.append(cycle(cache, prompt)))
    benchmark.extra_info |= {"page": page, "prompt_tokens": PROMPT_TOKENS}
    assert np.median(existing) == SHARED_TOKENS // page * page
    assert cache.counters.evictions["kv"] > len(existing) - 400


@pytest.mark.parametrize("page", [1, 64])
def test_requests_under_pressure(benchmark, page):
    cache = build(page, 200, PROMPT_TOKENS, native_slots=64, compressed_slots=128, watermark=4)
    numbers = iter(range(10**9))
    supply = Prompts(PROMPT_TOKENS, SHARED_TOKENS, 20)
    measure(benchmark, supply, 200, lambda prompt: request(cache, next(numbers), prompt))
    benchmark.extra_info |= {"page": page, "prompt_tokens": PROMPT_TOKENS}
    check(cache)
    assert cache.counters.hits["compressed"] > 0.75 * cache.counters.requests


def test_requests_as_a_simulator_makes_them(benchmark):
    """Prompts of 28 blocks, the hash of a block taken for a token."""
    cache = build(1, 400, 28, native_slots=96, compressed_slots=200, watermark=4)
    numbers = iter(range(10**9))
    supply = Prompts(28, 14, 200)
    measure(benchmark, supply, 1000, lambda prompt: request(cache, next(numbers), prompt))
    check(cache)


@pytest.mark.parametrize(
    "nodes",
    [
        1_000,
        pytest.param(10_000, marks=pytest.mark.usual),
        pytest.param(100_000, marks=pytest.mark.usual),
        pytest.param(1_000_000, marks=pytest.mark.long),
    ],
)
def test_growth_with_the_tree(benchmark, nodes):
    """A cycle in a full tree of as many short prompts."""
    cache = build(1, nodes, SHORT_TOKENS)
    supply = Prompts(SHORT_TOKENS, 0, 1)
    for _ in range(nodes // 500):
        for prompt in supply.take(500):
            cycle(cache, prompt)
    gc.freeze()  # the collector's passes over what was built are not the cache's work
    measure(benchmark, supply, 1000, lambda prompt: cycle(cache, prompt))
    gc.unfreeze()
    benchmark.extra_info["nodes"] = cache.ledger.tree.nodes
    assert cache.ledger.tree.nodes > 0.95 * nodes


def test_memory_of_a_node():
    """What a node and its state take beyond their token ids and page numbers."""
    nodes = 20_000
    cache = build(1, nodes, SHORT_TOKENS)
    batch = Prompts(SHORT_TOKENS, 0, 1).take(nodes)
    tracemalloc.start()
    for prompt in batch:
        cycle(cache, prompt)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    each = taken / cache.ledger.tree.nodes - SHORT_TOKENS * 8
    print(f"\n{each:.0f} bytes a node and state, beyond {SHORT_TOKENS * 8} bytes of token ids and page numbers")
    assert each < 1000
