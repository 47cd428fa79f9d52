"""What placements do in a scheduler, without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dasc.cache.counters import Counters
from dasc.fast.distributed import ExchangeError
from dasc.geometry import DtypePolicy
from dasc.layout import RaggedLayout
from dasc.sglang.arguments import HYBRID_EXCLUSIONS, check_hybrid_arguments
from dasc.sglang.placements import BalancedPool, permute_as_loaded
from dasc.sglang.refusing import EXIT_STATUS
from tests.masks import seeded_mask
from tests.sglang.test_pool import KDA, states


def gone(*arguments: Any, **options: Any) -> None:
    raise ExchangeError("the all-to-all failed on rank 0 of 2:\nconnection closed by peer")


@pytest.mark.usefixtures("unwinding")
@pytest.mark.parametrize("operation", ["store_from_active", "load_to_active"])
def test_a_rank_that_is_gone_stops_the_server_with_one_line(operation: str, capsys: pytest.CaptureFixture[str]):
    """An ``Exception`` would be told as a traceback."""
    layout = RaggedLayout.from_mask(KDA, seeded_mask(KDA, 0))
    exchanges: Any = SimpleNamespace(stores=SimpleNamespace(store=gone), loads=SimpleNamespace(load=gone))
    pool = BalancedPool(layout, 2, "cpu", Counters(), exchanges)
    with pytest.raises(SystemExit) as ended:
        getattr(pool, operation)(states(KDA, DtypePolicy(), 0), torch.tensor([1]), torch.tensor([1]))
    assert ended.value.code == EXIT_STATUS
    assert capsys.readouterr().err == "dasc: the all-to-all failed on rank 0 of 2: connection closed by peer\n"
    assert pool.counters.stored.total() + pool.counters.hits.total() == 0


class Doubling:
    """In the place of a permutation."""

    def permute(self, name: str, weight: Tensor) -> Tensor:
        if name == "packed":
            raise ValueError("the heads of packed cannot be permuted")
        return 2 * weight


class Model:
    """SGLang's ``load_weights`` takes pairs, and for some models triples, and returns what it likes."""

    def __init__(self) -> None:
        self.loaded: list[tuple[Any, ...]] = []

    def load_weights(self, weights: Any, is_mtp: bool = False) -> bool:
        self.loaded.extend(weights)
        return is_mtp


def test_every_load_of_weights_is_permuted_and_otherwise_as_it_was():
    model: Any = Model()
    permute_as_loaded(model, Doubling(), started=lambda: False)
    options = {"shard": 1}
    assert model.load_weights([("a", torch.ones(1)), ("b", torch.ones(1), options)], is_mtp=True) is True
    assert model.load_weights(iter([("c", torch.ones(1))])) is False
    assert [(name, float(weight), *more) for name, weight, *more in model.loaded] == [
        ("a", 2.0),
        ("b", 2.0, options),
        ("c", 2.0),
    ]


@pytest.mark.usefixtures("unwinding")
def test_a_weight_that_cannot_be_permuted_stops_the_start_but_only_fails_a_later_update(
    capsys: pytest.CaptureFixture[str],
):
    model: Any = Model()
    started = False
    permute_as_loaded(model, Doubling(), started=lambda: started)
    with pytest.raises(SystemExit) as ended:
        model.load_weights([("packed", torch.ones(1))])
    assert ended.value.code == EXIT_STATUS
    assert capsys.readouterr().err == "dasc: the heads of packed cannot be permuted\n"
    started = True
    with pytest.raises(ValueError, match="cannot be permuted"):
        model.load_weights([("packed", torch.ones(1))])


@pytest.mark.parametrize("exclusion", HYBRID_EXCLUSIONS, ids=lambda e: e.argument)
def test_what_brings_heads_in_the_models_order_is_refused(exclusion: Any):
    nothing = {e.argument: None for e in HYBRID_EXCLUSIONS}
    check_hybrid_arguments(SimpleNamespace(**nothing))
    with pytest.raises(ValueError, match=f"placement hybrid and --{exclusion.argument.replace('_', '-')} .* order"):
        check_hybrid_arguments(SimpleNamespace(**{**nothing, exclusion.argument: ["x"]}))
