"""What a scheduler's plugin settles beside its pools."""

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache import registry
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

from dasc.cache.counters import Counters
from dasc.layout import RaggedLayout
from dasc.sglang import pool, serving
from dasc.sglang.arguments import EXCLUSIONS
from dasc.sglang.config import Config
from tests.masks import seeded_mask
from tests.sglang.test_pool import KDA


@pytest.mark.parametrize(("replica", "labels"), [(None, {"tp_rank": "0"}), (2, {"tp_rank": "0", "dp_rank": "2"})])
def test_replicas_have_metrics_of_their_own(
    replica: int | None, labels: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    """Else their counts would be added up, and of their gauges one shown."""
    made: list[Any] = []
    monkeypatch.setattr(serving, "Exporter", lambda counters, gauges, labels: made.append(labels))
    monkeypatch.setattr(serving, "Reporter", lambda *args: SimpleNamespace(start=lambda: None))
    held: Any = SimpleNamespace(occupancy=dict)
    with get_context().override_server_args(enable_metrics=True), get_parallel().override(tp_rank=0, dp_rank=replica):
        serving.Serving(Config("auto")).report(held)
    assert made == [labels]


def test_compressed_slots_are_released_with_sglangs_caches_and_what_says_which_are_free_is_not(
    monkeypatch: pytest.MonkeyPatch,
):
    """``release_memory_occupation``: the caches are emptied after their memory is gone."""
    made, inside = [], []

    @contextmanager
    def region(tag: str) -> Iterator[None]:
        inside.append(tag)
        yield
        inside.pop()

    def note(name: str, function: Any) -> None:
        monkeypatch.setattr(
            pool, name, lambda *args, **kwargs: made.append((name, *inside)) or function(*args, **kwargs)
        )

    note("zero_slots", pool.zero_slots)
    note("MambaSlotAllocator", pool.MambaSlotAllocator)
    monkeypatch.setattr(
        TorchMemorySaverAdapter, "create", lambda enable: SimpleNamespace(region=region) if enable else None
    )
    with get_context().override_server_args(enable_memory_saver=True):
        memory = serving._released_with_kv()
    pool.CompressedPool(RaggedLayout.from_mask(KDA, seeded_mask(KDA, 0)), 2, "cpu", Counters(), memory=memory)
    assert made == [("zero_slots", "kv_cache"), ("MambaSlotAllocator",)]


def test_every_other_cache_that_sglang_may_choose_is_refused():
    """They would take compressed slots, or handles, for states."""
    asked = re.findall(r"get_memory\(\)\.(enable_\w+)", inspect.getsource(registry.default_radix_cache_factory))
    assert set(asked) - {exclusion.argument for exclusion in EXCLUSIONS} == set()
    assert len(asked) >= 3
