"""What a running server tells: metrics on its own endpoint, a line in its log now and then, a table at the start."""

import json
import re
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.sglang import runs
from tests.sglang.engines import ARGUMENTS
from tests.sglang.servers import served

DENSE_SLOTS, POOL_SLOTS = 32, 3


class Server:
    """A server that runs, by HTTP."""

    def __init__(self, address: str, log: Path) -> None:
        self.address = address
        self.log = log

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.address + path, timeout=30) as answer:
            return answer.read().decode()

    def generate(self, tokens: list[int]) -> int:
        """Tokens found in the cache."""
        body = {"input_ids": tokens, "sampling_params": {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}}
        request = urllib.request.Request(
            self.address + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())["meta_info"]["cached_tokens"]

    def metric(self, name: str, label: str = "") -> float:
        """Value of a metric of rank 0; 0 before it is there."""
        found = re.findall(rf"^{name}\{{(.*)\}} (.*)$", self.get("/metrics"), re.MULTILINE)
        return sum(float(value) for labels, value in found if 'tp_rank="0"' in labels and label in labels)


def eventually(condition: Callable[[], bool]) -> bool:
    """Metrics and log follow within a second or so."""
    deadline = time.monotonic() + 20
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log.txt"
    env = {"DASC_PLAN": "auto", "DASC_W_MAX": "64", "DASC_POOL": str(POOL_SLOTS), "DASC_LOG_INTERVAL": "1"}
    arguments = {**ARGUMENTS, "max_mamba_cache_size": DENSE_SLOTS, "log_level": "info"}
    with served(runs.model("kimi-linear"), log, env, arguments) as address:
        yield Server(address, log)


def test_stores_loads_and_evictions_are_on_the_servers_own_metrics_endpoint(server: Server):
    """Beside SGLang's metrics, counted by a scheduler and served by another process."""
    first = list(range(10, 40))
    assert server.generate(first) == 0
    assert server.generate([*first, 5, 6]) == len(first)
    assert eventually(lambda: server.metric("dasc_cache_hits_total", 'tier="compressed"') == 1)
    for start in (50, 100, 150):
        server.generate(list(range(start, start + 20)))
    assert eventually(lambda: server.metric("dasc_cache_compressed_slots_held") == POOL_SLOTS)

    def stored_and_evicted() -> bool:
        stored = server.metric("dasc_cache_stored_total", 'tier="compressed"')
        # of each request the state of its prompt and that of its end
        return stored >= 10 and server.metric("dasc_cache_evictions_total", "cause") == stored - POOL_SLOTS

    assert eventually(stored_and_evicted)
    assert server.metric("dasc_cache_compressed_slots") == POOL_SLOTS
    assert server.metric("dasc_cache_compressed_bytes") > 0
    assert "sglang:" in server.get("/metrics")


def test_the_log_tells_of_the_plan_the_memory_and_what_happened_since(server: Server):
    server.generate(list(range(200, 230)))
    assert eventually(lambda: "compressed slots held" in server.log.read_text())
    text = server.log.read_text()
    assert re.search(r"dasc: compressed-only, nr, W_max 64, ragged, placement off: \d+ of 384 units kept", text)
    assert re.search(rf"dense alone +{DENSE_SLOTS} .*\nnative +\d+ .*\ncompressed +{POOL_SLOTS} ", text)
    assert re.search(rf"dasc: \d of {POOL_SLOTS} compressed slots held .*; since the start \d+ stored", text)
