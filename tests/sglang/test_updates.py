"""New weights in a running server: SGLang's own updaters, around a model that only notes what it gets."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.model_executor.model_runner_components.weight_exporter import WeightExporter
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.runtime_context import get_context, get_parallel

from dasc.sglang.config import Config
from dasc.sglang.placements import permute_as_loaded
from dasc.sglang.serving import Serving
from dasc.sglang.updates import WeightUpdates
from tests.sglang.test_placements import Doubling


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1), requires_grad=False)

    def load_weights(self, weights: Any) -> None:
        for _, weight in weights:
            self.weight.copy_(weight)


class Server:
    """The weights of one rank, in the hands of SGLang's updater with our hooks on it."""

    def __init__(self, *, permuted: bool) -> None:
        serving, self.model = Serving(Config("auto")), Model()
        if permuted:
            serving.permutation = Doubling()  # type: ignore[assignment]
            permute_as_loaded(self.model, serving.permutation, started=lambda: True)
        self._hooks = WeightUpdates(serving)
        parts: dict[str, Any] = dict.fromkeys(WeightUpdater.__dataclass_fields__)
        parts |= {"device": "cpu", "custom_weight_loaders": {}, "get_model": lambda: self.model}
        self._updater = WeightUpdater(**parts)

    def update(self, name: str, value: float, load_format: str | None = None) -> tuple[bool, str]:
        with get_context().override_server_args(weight_cache_mode="off"), get_parallel().override(tp_rank=0):
            return self._hooks.update_from_tensor(
                WeightUpdater.update_weights_from_tensor,
                self._updater,
                named_tensors=[(name, torch.full((1,), value))],
                load_format=load_format,
            )

    def updated(self, rank: int = 0) -> tuple[bool, str]:
        manager: Any = SimpleNamespace(flush_cache=lambda **_: True)
        request = SimpleNamespace(flush_cache=True, torch_empty_cache=False)
        original = SchedulerWeightUpdaterManager.flush_cache_after_weight_update
        with mock.patch("dasc.sglang.updates.get_parallel", return_value=SimpleNamespace(tp_rank=rank)):
            return self._hooks.after_update(original, manager, request, True, "updated")

    @property
    def weight(self) -> float:
        return float(self.model.weight)


def test_weights_by_their_names_in_the_checkpoint_are_permuted_in_an_update_too():
    server = Server(permuted=True)
    assert server.update("weight", 1.0) == (True, "Success")
    assert server.weight == 2.0


def test_weights_written_past_the_permutation_are_refused_and_nothing_is_written():
    server = Server(permuted=True)
    success, message = server.update("weight", 1.0, "direct")
    assert not success
    assert "load_format 'direct' writes weights in the model's order of heads, and placement hybrid" in message
    assert server.weight == 0.0


def test_without_a_permutation_they_are_as_good_as_any():
    server = Server(permuted=False)
    assert server.update("weight", 1.0, "direct") == (True, "Success")
    assert server.weight == 1.0


def test_a_weight_that_cannot_be_permuted_fails_its_update_and_not_the_server():
    success, message = Server(permuted=True).update("packed", 1.0)
    assert not success
    assert "the heads of packed cannot be permuted; the weights before it are updated" in message


def test_permuted_weights_neither_leave_for_a_file_nor_for_another_server():
    server = Server(permuted=True)
    exporter = WeightExporter(tp_rank=0, tp_size=1, gpu_id=0, get_model_path=str, get_model=lambda: server.model)
    reason = "dasc: placement hybrid has the heads of weights in an order of its own"
    with pytest.raises(RuntimeError, match=reason):
        exporter.save_sharded_model("nowhere")
    with pytest.raises(RuntimeError, match=reason):
        exporter.save_remote_model("nowhere")
    assert exporter.init_weights_send_group_for_remote_instance("", "1", 0, 1, "group") == (False, reason)
    assert exporter.send_weights_to_remote_instance("", "1", "group") == (False, reason)


def test_the_log_says_once_that_the_plan_is_of_the_weights_before(caplog: pytest.LogCaptureFixture):
    server = Server(permuted=False)
    with caplog.at_level(logging.WARNING):
        assert [server.updated(), server.updated()] == [(True, "updated")] * 2
    [said] = [record.getMessage() for record in caplog.records]
    assert "kept or omitted by the decay parameters that the server started with" in said


def test_other_ranks_leave_that_to_the_first(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        assert Server(permuted=False).updated(rank=1) == (True, "updated")
    assert not caplog.records
