"""The cache's counters in Prometheus text format. Needs prometheus-client (``pip install "dasc[metrics]"``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dasc.cache.counters import LABELS
from dasc.cache.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

_PREFIX = "dasc_cache_"


class CacheCollector:
    """Reads a cache each time it is scraped. Register it with a ``prometheus_client.CollectorRegistry``.

    Counters are ``dasc_cache_<name>_total``, with the label of :data:`~dasc.cache.counters.LABELS`; occupancy is gauges
    ``dasc_cache_<name>``. Seconds are called ``_seconds``, as is usual there.

    Raises:
        ImportError: when prometheus-client is missing, saying how to get it.
    """

    def __init__(self, cache: PrefixCache) -> None:
        try:
            import prometheus_client.core
        except ImportError as error:
            raise ImportError('metrics need prometheus-client: pip install "dasc[metrics]"') from error
        self._core = prometheus_client.core
        self._cache = cache

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """The present values."""
        for name, value in self._cache.counters.as_dict().items():
            metric = _PREFIX + (name.removesuffix("_s") + "_seconds" if name.endswith("_s") else name)
            label = LABELS.get(name)
            family = self._core.CounterMetricFamily(metric, name.replace("_", " "), labels=[label] if label else None)
            if isinstance(value, dict):
                for key in sorted(value):
                    family.add_metric([key], value[key])
            else:
                family.add_metric([], value)
            yield family
        for name, value in self._cache.ledger.occupancy().items():
            gauge = self._core.GaugeMetricFamily(_PREFIX + name, name.replace("_", " "))
            gauge.add_metric([], value)
            yield gauge


def prometheus_text(cache: PrefixCache) -> str:
    """All metrics of one cache in text format.

    Raises:
        ImportError: when prometheus-client is missing, saying how to get it.
    """
    collector = CacheCollector(cache)
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry).decode()
