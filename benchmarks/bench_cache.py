"""Cost of the cache's host logic: operations a second under pressure, growth with the size of the tree, memory a node.

    pytest benchmarks/bench_cache.py

One *cycle* is what a server does to the cache for a request: match the prompt, make room for it (evicting what was used
longest ago, KV and state), insert it with its state. The prompts are ready-made arrays of token ids, as a tokenizer would
hand them over.
"""

import gc
import tracemalloc

import numpy as np
import pytest

from dasc.cache import CacheConfig, InlineMover, PrefixCache, StateEntry, check, encode_tokens

PROMPT_TOKENS = 2000
SHARED_TOKENS = 1000
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


def prompts(count: int, tokens: int, shared: int, groups: int) -> list[np.ndarray]:
    """Prompts in groups that share their first ``shared`` tokens."""
    rng = np.random.default_rng(0)
    heads = rng.integers(0, VOCABULARY, (groups, shared), dtype=np.int32)
    tails = rng.integers(0, VOCABULARY, (count, tokens - shared), dtype=np.int32)
    return [np.concatenate([heads[g], tail]) for g, tail in zip(rng.integers(0, groups, count), tails)]


def cycle(cache: PrefixCache, prompt: np.ndarray) -> int:
    """Match, make room, insert; returns how many tokens were there already."""
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
    if node.state is None:
        node.state, entry.owner = entry, node
    else:
        ledger.store.evict(entry, "again")
    return existing


def request(cache: PrefixCache, number: int, prompt: np.ndarray) -> StateEntry:
    """The same through the front door: admission, loads, checkpoints at junctions, end."""
    cache.step()
    cache.acquire(number, prompt)
    cache.issue_loads()
    end = len(prompt) // cache.config.page_size * cache.config.page_size
    while (stop := cache.next_stop(number)) is not None and stop <= end:
        cache.advance(number, stop)
        cache.checkpoint(number, stop)
    cache.advance(number, end)
    return cache.finish(number)


def build(page: int, states: int, tokens: int, **options) -> PrefixCache:
    """A cache with KV for ``states`` prompts."""
    options = {"native_slots": states + 8, "compressed_slots": 0} | options
    return PrefixCache(CacheConfig(kv_pages=states * -(-tokens // page), page_size=page, **options), InlineMover(NoData()))


@pytest.mark.parametrize("page", [1, 64])
def test_cycles_under_pressure(benchmark, page):
    cache = build(page, 100, PROMPT_TOKENS)
    batch = prompts(400, PROMPT_TOKENS, SHARED_TOKENS, 20)

    def run() -> int:
        return sum(cycle(cache, prompt) for prompt in batch)

    found = benchmark.pedantic(run, rounds=5, warmup_rounds=1)
    assert found > 0.3 * len(batch) * SHARED_TOKENS
    assert cache.counters.evictions["kv"] > 3 * len(batch)
    benchmark.extra_info |= {
        "prompt_tokens": PROMPT_TOKENS,
        "page": page,
        "us_per_cycle": benchmark.stats["median"] / len(batch) * 1e6,
    }


@pytest.mark.parametrize("page", [1, 64])
def test_requests_under_pressure(benchmark, page):
    cache = build(page, 200, PROMPT_TOKENS, native_slots=64, compressed_slots=128, watermark=4)
    batch = prompts(400, PROMPT_TOKENS, SHARED_TOKENS, 20)
    numbers = iter(range(10**9))

    def run() -> None:
        for prompt in batch:
            request(cache, next(numbers), prompt)

    benchmark.pedantic(run, rounds=5, warmup_rounds=1)
    check(cache)
    assert cache.counters.hit_tokens["compressed"] > 0
    benchmark.extra_info |= {
        "prompt_tokens": PROMPT_TOKENS,
        "page": page,
        "us_per_request": benchmark.stats["median"] / len(batch) * 1e6,
    }


def test_requests_as_a_simulator_makes_them(benchmark):
    """Prompts of 28 blocks, a block hash taken for a token."""
    cache = build(1, 400, 28, native_slots=96, compressed_slots=200, watermark=4)
    batch = prompts(2000, 28, 14, 200)
    numbers = iter(range(10**9))

    def run() -> None:
        for prompt in batch:
            request(cache, next(numbers), prompt)

    benchmark.pedantic(run, rounds=5, warmup_rounds=1)
    check(cache)
    benchmark.extra_info["us_per_request"] = benchmark.stats["median"] / len(batch) * 1e6


@pytest.mark.parametrize("nodes", [1_000, 10_000, 100_000, 1_000_000])
def test_growth_with_the_tree(benchmark, nodes):
    """A cycle in a full tree of ``nodes`` short prompts, and the memory of a node beyond its token ids and page numbers."""
    tokens = 16
    cache = build(1, nodes, tokens)
    trace = nodes <= 100_000
    if trace:
        tracemalloc.start()
    gc.disable()
    rng = np.random.default_rng(1)
    for _ in range(nodes // 500):
        for prompt in rng.integers(0, VOCABULARY, (500, tokens), dtype=np.int32):
            cycle(cache, prompt)
    if trace:
        data = cache.ledger.tree.pages * 8
        node_bytes = (tracemalloc.get_traced_memory()[0] - data) / cache.ledger.tree.nodes
        tracemalloc.stop()
        benchmark.extra_info["overhead_bytes_per_node"] = node_bytes
        assert node_bytes < 1500
    assert cache.ledger.tree.nodes > 0.9 * nodes
    batch = rng.integers(0, VOCABULARY, (2000, tokens), dtype=np.int32)

    def run() -> None:
        for prompt in batch:
            cycle(cache, prompt)

    benchmark.pedantic(run, rounds=5, warmup_rounds=1)
    gc.enable()
    benchmark.extra_info |= {
        "nodes": cache.ledger.tree.nodes,
        "us_per_cycle": benchmark.stats["median"] / len(batch) * 1e6,
    }
