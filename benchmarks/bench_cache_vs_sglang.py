"""Cache operations a second against SGLang's UnifiedRadixCache with recurrent state, both on the CPU in one run.

    PYTHONPATH=. python benchmarks/bench_cache_vs_sglang.py      # in an environment with sglang 0.5.23

Of this package only ``dasc.cache`` is imported, which needs numpy. Without sglang the exit status is 2.

The work is the same for both, through each one's own interface. An operation is what a server asks of the cache for
one request, from admission to its end: match the prompt and hold the state hit, take a state slot and KV for what is
not cached (evicting the least recently used), keep the request's row of KV numbers, then store the state at the end of
the prompt by handing the slot over, and let go. For SGLang these are the steps of its scheduler and of
``UnifiedRadixCache.checkpoint_into_tree``, without its request objects.

Both have the same prompts in the form they take them, as many state slots and KV tokens, full from the start, and must
serve the same share of tokens. Prompts of 2,000 tokens share their first 1,000, whose state is cached, with others of
32 groups; the other 1,000 are new, so each operation hits, inserts and evicts.

No tensor data is moved for either: KV is never computed, no state is copied into the active slot. What remains is host
work. SGLang keeps slots, KV numbers and rows in tensors: on a GPU those operations would be launches, not the CPU work
measured here. Its tree core comes in Rust (its default) and Python; both are measured. Rounds of the three alternate,
in processor time of this process; the figures are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from array import array
from unittest import mock

import numpy as np

from dasc.cache import CacheConfig, InlineMover, Lease, PrefixCache

GROUPS = 32
STATE_SLOTS = 128
PROMPT_TOKENS = 2000
SHARED_TOKENS = 1000
KV_TOKENS = (GROUPS + STATE_SLOTS) * SHARED_TOKENS
VOCABULARY = 150_000


class NoData:
    """Moves nothing."""

    def pack(self, native_slot, compressed_slot):
        pass

    def copy(self, pairs):
        pass

    def load(self, compressed_slot, active_slot, position):
        pass

    def clear(self, slots):
        pass


class Ours:
    name = "dasc"

    def __init__(self, page: int) -> None:
        config = CacheConfig(
            native_slots=STATE_SLOTS, compressed_slots=0, kv_pages=KV_TOKENS // page, page_size=page, policies=()
        )
        self.cache = PrefixCache(config, InlineMover(NoData()))
        self.page = page
        self.number = 0

    def prepare(self, prompt: np.ndarray) -> np.ndarray:
        return prompt

    def serve(self, prompt: np.ndarray) -> int:
        """One operation; returns the tokens served from the cache."""
        cache = self.cache
        self.number += 1
        cache.step()
        lease = cache.acquire(self.number, prompt)
        assert isinstance(lease, Lease)
        cache.issue_loads()
        cache.advance(self.number, len(prompt) // self.page * self.page)
        cache.finish(self.number)
        return lease.hit_tokens


class SGLang:
    def __init__(self, page: int, core: str) -> None:
        from sglang.srt.environ import envs
        from sglang.srt.mem_cache import base_prefix_cache
        from sglang.srt.mem_cache.radix_cache import RadixKey
        from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
        from sglang.test.kits.unified_radix_cache import config, fixtures

        self.name = f"sglang ({core} core)"
        sizes = config.CacheConfig(
            page_size=page,
            components=(ComponentType.FULL, ComponentType.MAMBA),
            enable_mamba_extra_buffer=page > 1,  # it takes larger pages only so
            mamba_cache_size=STATE_SLOTS,
            kv_size=KV_TOKENS,
            max_context_len=2 * PROMPT_TOKENS,
            # the tensors are never touched: as small as can be
            num_layers=2,
            full_attention_layer_ids=(1,),
            head_num=1,
            head_dim=8,
        )
        with mock.patch.object(fixtures, "get_device", return_value="cpu"):
            with_inspector, self.kv, pool = fixtures.build_fixture(sizes, tree_core_backend="python")
        with envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND.override(core):  # the core that servers run
            self.cache = UnifiedRadixCache(params=with_inspector.cache_init_params)
        self.slots = pool.mamba_allocator
        self.row = pool.req_to_token[1]
        self.page = page
        self.api = base_prefix_cache
        self.key = RadixKey

    def prepare(self, prompt: np.ndarray) -> array:
        return array("q", prompt.tolist())

    def serve(self, prompt: array) -> int:
        import torch

        cache, kv, api = self.cache, self.kv, self.api
        match = cache.match_prefix(api.MatchPrefixParams(key=self.key(prompt[:-1])))
        hit = match.device_prefix_len
        lock = cache.lock(match.last_device_node)
        end = len(prompt) // self.page * self.page
        missing = end - hit - kv.available_size()
        if missing > 0:
            cache.evict_for_alloc(api.EvictParams(num_tokens=missing))
        slot = self.slots.alloc(1)
        if slot is None:
            cache.evict_for_alloc(api.EvictParams(num_tokens=0, mamba_num=1))
            slot = self.slots.alloc(1)
        row = self.row
        row[:hit] = cache.path_device_indices(match.last_device_node)
        row[hit:end] = kv.alloc(end - hit)

        result = cache.insert(
            api.InsertParams(
                key=self.key(prompt[:end]),
                value=row[:end].to(torch.int64, copy=True),
                mamba_value=slot,
                prev_prefix_len=hit,
            )
        )
        assert not result.mamba_exist
        row[hit:end] = cache.path_device_indices(result.last_device_node)[hit:]
        cache.unlock(lock)
        cache.unlock(cache.lock(result.last_device_node))
        return hit


class Prompts:
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)
        self.heads = self.ids(GROUPS, SHARED_TOKENS)

    def ids(self, *shape: int) -> np.ndarray:
        return self.rng.integers(0, VOCABULARY, shape, dtype=np.int32)

    def take(self, count: int) -> list[np.ndarray]:
        groups = np.concatenate(
            [self.rng.permutation(GROUPS) for _ in range(count // GROUPS)]
        )  # none is ever the oldest
        return [np.concatenate([self.heads[g], self.ids(PROMPT_TOKENS - SHARED_TOKENS)]) for g in groups]


def compare(page: int, rounds: int, operations: int) -> dict[str, object]:
    """Median operations a second of each, and how much of the prompts each served."""
    prompts = Prompts()
    caches = [Ours(page), SGLang(page, "rust"), SGLang(page, "python")]
    rates: dict[str, list[float]] = {cache.name: [] for cache in caches}
    served: dict[str, int] = dict.fromkeys(rates, 0)
    for head in prompts.heads:
        for cache in caches:
            cache.serve(cache.prepare(head))
    for number in range(rounds + 1):
        batch = prompts.take(operations)
        for cache in caches:
            ready = [cache.prepare(prompt) for prompt in batch]
            started = time.process_time()
            hits = sum(cache.serve(prompt) for prompt in ready)
            seconds = time.process_time() - started
            if number:  # the first round fills the caches
                rates[cache.name].append(operations / seconds)
                served[cache.name] += hits
    assert len(set(served.values())) == 1, f"they did not serve the same tokens: {served}"
    total = rounds * operations * PROMPT_TOKENS
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "page": page,
        "operations_per_s": medians,
        "served": {name: hits / total for name, hits in served.items()},
        "ratio": {name: medians["dasc"] / rate for name, rate in medians.items() if name != "dasc"},
    }


def import_sglang() -> None:
    """Make sglang importable beside a CPU build of torch, or leave with status 2."""
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    warnings.filterwarnings("ignore", module="sglang")
    try:
        import torch

        torch.set_num_threads(1)
        for name in ("nms", "qnms"):  # torchvision's own library cannot be loaded there, and only this is missed
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
        import sglang.srt.mem_cache.unified_radix_cache
        import sglang.test.kits.unified_radix_cache.fixtures  # noqa: F401
    except ImportError as error:
        print(f"bench_cache_vs_sglang: sglang 0.5.23 is not importable here ({error})", file=sys.stderr)
        sys.exit(2)


def main() -> None:
    parser = argparse.ArgumentParser(description="Cache operations a second against SGLang's UnifiedRadixCache.")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--operations", type=int, default=256, help=f"a round, a multiple of {GROUPS}")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.rounds < 1 or args.operations < GROUPS or args.operations % GROUPS:
        parser.error(f"rounds must be >= 1 and operations a positive multiple of {GROUPS}")
    import_sglang()
    results = [compare(page, args.rounds, args.operations) for page in (1, 64)]
    if args.json:
        print(json.dumps(results, indent=2))
        return
    for result in results:
        print(f"page {result['page']}, prompts of {PROMPT_TOKENS} tokens")
        for name, rate in result["operations_per_s"].items():
            ratio = f", dasc does {result['ratio'][name]:.2f} times as many" if name != "dasc" else ""
            print(f"  {name:22} {rate:9,.0f} operations/s, {result['served'][name]:.1%} of tokens served{ratio}")


if __name__ == "__main__":
    main()
