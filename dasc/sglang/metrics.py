"""What the plugin did, for people and for Prometheus: a line in the log, and ``dasc_`` metrics beside SGLang's own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from dasc.cache.counters import LABELS, Counters

if TYPE_CHECKING:
    import prometheus_client

logger = logging.getLogger(__name__)

EXPORT_INTERVAL_S = 1.0
_PREFIX = "dasc_cache_"


class Exporter:
    """Carries counters and gauges over to prometheus_client's default registry.

    SGLang's endpoint collects from files that the metrics of each process write (``PROMETHEUS_MULTIPROC_DIR``, which it
    sets before it starts processes). Only metrics, no collectors, take part in that.

    Args:
        counters: to export, as ``dasc_cache_<name>_total``.
        gauges: present values by name, exported as ``dasc_cache_<name>``.
        labels: of every metric, such as the rank.
    """

    def __init__(
        self, counters: Counters, gauges: Callable[[], Mapping[str, float]], labels: Mapping[str, str]
    ) -> None:
        self._counters = counters
        self._gauges = gauges
        self._labels = dict(labels)
        self._exported: dict[tuple[str, str], float] = {}
        self._counter_metrics = {name: self._counter(name) for name in counters.as_dict()}
        self._gauge_metrics = {name: self._gauge(name) for name in gauges()}

    def export(self) -> None:
        """Bring the metrics up to date."""
        for name, value in self._counters.as_dict().items():
            for label, count in value.items() if isinstance(value, dict) else [("", value)]:
                grown = count - self._exported.get((name, label), 0)
                if grown > 0:
                    own = {LABELS[name]: label} if name in LABELS else {}
                    self._counter_metrics[name].labels(**self._labels, **own).inc(grown)
                    self._exported[name, label] = count
        for name, present in self._gauges().items():
            self._gauge_metrics[name].labels(**self._labels).set(present)

    def _counter(self, name: str) -> prometheus_client.Counter:
        import prometheus_client

        metric = _PREFIX + (name.removesuffix("_s") + "_seconds" if name.endswith("_s") else name)
        labels = [*self._labels, *([LABELS[name]] if name in LABELS else [])]
        return prometheus_client.Counter(metric, name.replace("_", " "), labels)

    def _gauge(self, name: str) -> prometheus_client.Gauge:
        import prometheus_client

        return prometheus_client.Gauge(
            _PREFIX + name, name.replace("_", " "), list(self._labels), multiprocess_mode="mostrecent"
        )


class Reporter:
    """A thread that exports every second and logs a summary every ``interval_s``, when anything has happened since.

    Args:
        summary: the line to log.
        interval_s: 0 for no lines.
        exporter: ``None`` where SGLang's metrics are off.
    """

    def __init__(self, summary: Callable[[], str], interval_s: float, exporter: Exporter | None) -> None:
        self._summary = summary
        self._interval_s = interval_s
        self._exporter = exporter
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dasc-report", daemon=True)

    def start(self) -> None:
        """Start the thread, unless there is nothing to report to."""
        if self._interval_s > 0 or self._exporter is not None:
            self._thread.start()

    def close(self) -> None:
        """Stop the thread after a last export."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._exporter is not None:
            self._exporter.export()

    def _run(self) -> None:
        waited, said = 0.0, self._summary()
        step = EXPORT_INTERVAL_S if self._exporter is not None else self._interval_s
        while not self._stop.wait(step):
            waited += step
            if self._exporter is not None:
                self._exporter.export()
            if 0 < self._interval_s <= waited:
                waited, line = 0.0, self._summary()
                if line != said:
                    logger.info("%s", line)
                said = line
