"""What a scheduler's plugin settles beside its pools."""

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.runtime_context import get_context, get_parallel

from dasc.sglang import serving
from dasc.sglang.config import Config


@pytest.mark.parametrize(("replica", "labels"), [(None, {"tp_rank": "0"}), (2, {"tp_rank": "0", "dp_rank": "2"})])
def test_replicas_have_metrics_of_their_own(
    replica: int | None, labels: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    """Else their counts would be added up, and of their gauges one shown."""
    made: list[Any] = []
    monkeypatch.setattr(serving, "Exporter", lambda counters, gauges, labels: made.append(labels))
    monkeypatch.setattr(serving, "Reporter", lambda *args: SimpleNamespace(start=lambda: None))
    pool: Any = SimpleNamespace(occupancy=dict)
    with get_context().override_server_args(enable_metrics=True), get_parallel().override(tp_rank=0, dp_rank=replica):
        serving.Serving(Config("auto")).report(pool)
    assert made == [labels]
