"""Simulated requests a second: the real trace under pressure, and conversations of tokens.

    DASC_TRACE=conversation_6000.jsonl pytest benchmarks/bench_simulation.py

Without the trace only the conversations are measured.
"""

import time

import pytest

from dasc.cache import CacheConfig
from dasc.cache.simulation import MODEL_SIZES, Serving, estimate_cost, read_trace, simulate, wildchat_load
from tests.cache.traces import TRACE, needs_trace

pytestmark = pytest.mark.benchmark(timer=time.process_time)  # one thread of host work; other programs do not count

COST = estimate_cost(MODEL_SIZES["kimi_linear"], 8)


def measure(benchmark, load, config, serving) -> None:
    result = benchmark.pedantic(simulate, (load, config, COST, serving), rounds=5, warmup_rounds=1)
    requests = len(load.requests)
    assert len(result.requests) == requests
    assert sum(result.counters["evictions"].values()) > requests / 4
    hit_tokens = sum(r.hit_tokens for r in result.requests)
    if benchmark.stats is not None:  # None when benchmarks are only tried out
        benchmark.extra_info |= {
            "requests": requests,
            "requests_per_second": round(requests / benchmark.stats["median"]),
            "token_hit_rate": round(hit_tokens / sum(r.prompt_tokens for r in result.requests), 3),
        }


@needs_trace
@pytest.mark.usual
@pytest.mark.parametrize("arm", ["dense", "two-tier"])
def test_the_real_trace(benchmark, arm):
    pools = {"native_slots": 196} if arm == "dense" else {"native_slots": 40, "compressed_slots": 363}
    config = CacheConfig(**{"compressed_slots": 0} | pools, kv_pages=10_000)
    measure(benchmark, read_trace(TRACE), config, Serving(server_limit=32))


def test_conversations_of_tokens(benchmark):
    config = CacheConfig(native_slots=40, compressed_slots=200, kv_pages=4_000_000)
    measure(benchmark, wildchat_load(0), config, Serving(server_limit=32, concurrency=256))
