"""Which implementation runs is said, never guessed: what cannot run is an error with its reason."""

import inspect
from unittest.mock import Mock

import pytest
import torch

from dasc import fast, reference
from dasc.fast import cpu
from tests.inputs import DeltaRuleCase

NAMES = cpu.__all__


def test_auto_follows_the_tensors():
    assert (
        fast.chosen_impl() == fast.chosen_impl("auto", "cpu") == fast.chosen_impl("cpu", torch.device("cpu")) == "cpu"
    )


@pytest.mark.parametrize(
    ("impl", "device", "reason"),
    [
        ("triton", "cpu", "no Triton kernels yet"),
        ("triton", "cuda", "no Triton kernels yet"),
        ("auto", "cuda:1", "'cuda': .*no Triton kernels yet"),
        ("cpu", "cuda", "'cuda': it takes tensors on the CPU"),
        ("cuda", "cpu", "must be 'auto', 'cpu' or 'triton', got 'cuda'"),
    ],
)
def test_what_cannot_run_says_why(impl, device, reason):
    with pytest.raises(ValueError, match=f"^impl .*{reason}"):
        fast.chosen_impl(impl, device)


@pytest.mark.parametrize("name", NAMES)
def test_signatures_are_those_of_the_reference_and_an_impl(name):
    parameters = dict(inspect.signature(getattr(fast, name)).parameters)
    impl = parameters.pop("impl")
    assert (impl.default, impl.kind) == ("auto", inspect.Parameter.KEYWORD_ONLY)
    assert parameters == dict(inspect.signature(getattr(reference, name)).parameters)
    assert parameters == dict(inspect.signature(getattr(cpu, name)).parameters)


@pytest.mark.parametrize("name", NAMES)
def test_every_function_hands_its_arguments_on_and_asks_first_whether_it_may(name, monkeypatch):
    values = {p: torch.zeros(1) for p in inspect.signature(getattr(cpu, name)).parameters}
    if name == "unpack":
        values["packed"] = fast.PackedState(torch.zeros(1), torch.zeros(1), None)
    stand_in = Mock()
    monkeypatch.setattr(cpu, name, stand_in)
    getattr(fast, name)(**values, impl="cpu")
    passed_on = inspect.signature(getattr(reference, name)).bind(*stand_in.call_args.args, **stand_in.call_args.kwargs)
    assert all(passed_on.arguments[p] is value for p, value in values.items())
    with pytest.raises(ValueError, match="no Triton kernels yet"):
        getattr(fast, name)(**values, impl="triton")
    assert stand_in.call_count == 1


def test_meta_tensors_are_refused():
    inputs = {p: t.to("meta") for p, t in DeltaRuleCase(1, 4, 1, 1, 2, 3, False).build().items()}
    with pytest.raises(ValueError, match="impl 'auto' cannot run for tensors on 'meta'"):
        fast.chunk_gdn(**inputs)
