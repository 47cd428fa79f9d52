import re
import sys

import pytest

from dasc.cache import CacheConfig
from dasc.cache.metrics import CacheCollector, prometheus_text
from tests.cache.fakes import Host


def busy_host() -> Host:
    host = Host(CacheConfig(native_slots=3, compressed_slots=1, kv_pages=50, native_slot_bytes=100, policies=()))
    host.run("a", [1, 2, 3])
    host.cache.step()
    host.run("b", [1, 2, 3, 4])
    host.run("c", [9, 9], store=False)
    return host


def test_all_counts_are_exported_once_in_text_format():
    pytest.importorskip("prometheus_client")
    host = busy_host()
    text = prometheus_text(host.cache)
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    values = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines}
    assert len(values) == len(lines)
    assert values["dasc_cache_requests_total"] == 3
    assert values['dasc_cache_hits_total{tier="compressed"}'] == 1
    assert values['dasc_cache_not_cached_total{reason="opted_out"}'] == 1
    assert values["dasc_cache_dense_bytes"] == 100
    assert values["dasc_cache_stall_seconds_total"] >= 0
    names = {re.match(r"dasc_cache_(\w+)", line)[1] for line in lines}
    for name, value in host.cache.stats().items():
        expected = name.removesuffix("_s") + "_seconds" if name.endswith("_s") else name
        assert value == {} or {expected, expected + "_total"} & names, name


def test_without_prometheus_client_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setitem(sys.modules, "prometheus_client.core", None)
    with pytest.raises(ImportError, match=r'pip install "dasc\[metrics\]"'):
        CacheCollector(busy_host().cache)


def test_stats_are_plain_and_a_copy():
    host = busy_host()
    stats = host.cache.stats()
    assert stats["hits"] == {"miss": 2, "compressed": 1}
    assert type(stats["hits"]) is dict
    stats["hits"]["miss"] = 99
    assert host.cache.counters.hits["miss"] == 2
    assert stats["native_free"] + stats["running"] + stats["dense"] + stats["demoting"] == stats["native_slots"]
