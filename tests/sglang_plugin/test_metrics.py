import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import prometheus_client
import pytest

from dasc.cache.counters import Counters
from dasc.sglang import metrics
from dasc.sglang.metrics import Exporter, Reporter


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> prometheus_client.CollectorRegistry:
    """In the place of the default registry, which a process has once."""
    registry = prometheus_client.CollectorRegistry()
    for kind in (prometheus_client.Counter, prometheus_client.Gauge):
        monkeypatch.setattr(prometheus_client, kind.__name__, _in_registry(kind, registry))
    return registry


def _in_registry(kind: type, registry: prometheus_client.CollectorRegistry):
    return lambda *args, **kwargs: kind(*args, registry=registry, **kwargs)


def test_counters_and_gauges_are_exported_under_dasc_names_with_their_labels(registry):
    counters, present = Counters(), {"compressed_slots_held": 3.0}
    exporter = Exporter(counters, lambda: present, {"tp_rank": "1"})
    counters.stored["compressed"] += 2
    counters.stall_s += 0.5
    exporter.export()
    present["compressed_slots_held"] = 5.0
    counters.stored["compressed"] += 3
    counters.evictions["compressed"] += 1
    exporter.export()
    exporter.export()
    value = registry.get_sample_value
    rank = {"tp_rank": "1"}
    assert value("dasc_cache_stored_total", {**rank, "tier": "compressed"}) == 5
    assert value("dasc_cache_evictions_total", {**rank, "cause": "compressed"}) == 1
    assert value("dasc_cache_stall_seconds_total", rank) == 0.5
    assert value("dasc_cache_compressed_slots_held", rank) == 5
    assert value("dasc_cache_demotions_total", rank) is None  # never counted


def test_what_processes_count_is_summed_by_prometheus_multiprocess_collector(tmp_path: Path):
    """As SGLang collects it: from the files of its scheduler processes, in another process."""
    count = (
        "import sys\nfrom dasc.cache.counters import Counters\nfrom dasc.sglang.metrics import Exporter\n"
        "c = Counters()\ne = Exporter(c, lambda: {'compressed_slots': float(sys.argv[3])}, {'tp_rank': sys.argv[1]})\n"
        "c.stored['compressed'] += int(sys.argv[2])\ne.export()\n"
    )
    environ = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for arguments in (("0", "1", "4"), ("0", "1", "7"), ("1", "5", "7")):  # rank 0 was started again
        subprocess.run([sys.executable, "-c", count, *arguments], env=environ, check=True)
    collected = prometheus_client.CollectorRegistry()
    from prometheus_client import multiprocess

    multiprocess.MultiProcessCollector(collected, path=str(tmp_path))
    for rank, stored in (("0", 2), ("1", 5)):
        labels = {"tp_rank": rank, "tier": "compressed"}
        assert collected.get_sample_value("dasc_cache_stored_total", labels) == stored
        assert collected.get_sample_value("dasc_cache_compressed_slots", {"tp_rank": rank}) == 7


def test_the_summary_is_logged_once_for_each_change(caplog: pytest.LogCaptureFixture):
    lines = iter(["at the start", "one stored", "one stored"])
    asked = threading.Event()

    def summary() -> str:
        line = next(lines, None)
        if line is None:
            asked.set()
            return "one stored"
        return line

    caplog.set_level(logging.INFO, metrics.__name__)
    reporter = Reporter(summary, 0.01, None)
    reporter.start()
    assert asked.wait(10)
    reporter.close()
    assert caplog.messages == ["one stored"]


def test_nothing_to_report_to_takes_no_thread():
    before = threading.active_count()
    reporter = Reporter(lambda: "", 0, None)
    reporter.start()
    assert threading.active_count() == before
    reporter.close()


def test_closing_exports_what_was_counted_last(registry, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(metrics, "EXPORT_INTERVAL_S", 60.0)
    counters = Counters()
    reporter = Reporter(lambda: "", 0, Exporter(counters, dict, {"tp_rank": "0"}))
    reporter.start()
    counters.spills += 1
    reporter.close()
    assert registry.get_sample_value("dasc_cache_spills_total", {"tp_rank": "0"}) == 1
