"""Which implementation runs is said, never guessed: what cannot run is an error with its reason."""

import inspect
from unittest.mock import Mock

import pytest
import torch

from dasc import fast, reference
from dasc.fast import choice, cpu
from tests.inputs import DeltaRuleCase

NAMES = cpu.__all__
NEEDS_GPU = "Triton needs a GPU; TRITON_INTERPRET=1"


def test_auto_follows_the_tensors():
    assert (
        fast.chosen_impl() == fast.chosen_impl("auto", "cpu") == fast.chosen_impl("cpu", torch.device("cpu")) == "cpu"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="these say what a machine without a GPU is told")
@pytest.mark.parametrize(
    ("impl", "device", "reason"),
    [
        ("triton", "cpu", NEEDS_GPU),
        ("triton", "cuda", "no CUDA device is available"),
        ("auto", "cuda:1", "'cuda': no CUDA device is available"),
        ("auto", "mps", "'mps': the kernels are written for NVIDIA GPUs"),
        ("cpu", "cuda", "'cuda': it takes tensors on the CPU"),
        ("cuda", "cpu", "must be 'auto', 'cpu' or 'triton', got 'cuda'"),
    ],
)
def test_what_cannot_run_says_why(impl, device, reason):
    with pytest.raises(ValueError, match=f"^impl .*{reason}"):
        fast.chosen_impl(impl, device)


def test_triton_that_is_not_installed_is_the_reason_given(monkeypatch):
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"impl 'triton' cannot run .* Triton is not installed; pip install"):
        fast.chosen_impl("triton", "cpu")
    assert fast.chosen_impl("auto", "cpu") == "cpu"


@pytest.mark.parametrize("name", NAMES)
def test_signatures_are_those_of_the_reference_and_an_impl(name):
    parameters = dict(inspect.signature(getattr(fast, name)).parameters)
    impl = parameters.pop("impl")
    assert (impl.default, impl.kind) == ("auto", inspect.Parameter.KEYWORD_ONLY)
    assert parameters == dict(inspect.signature(getattr(reference, name)).parameters)
    assert parameters == dict(inspect.signature(getattr(cpu, name)).parameters)


def test_triton_offers_the_same_functions_with_the_same_signatures():
    pytest.importorskip("triton")
    from dasc.fast import triton as kernels

    assert set(kernels.__all__) - set(NAMES) == {"ChunkTable", "chunk_table"}
    for name in NAMES:
        parameters = dict(inspect.signature(getattr(kernels, name)).parameters)
        if name.startswith("prefill_"):
            assert parameters.pop("table").default is None  # what a server makes once for all layers
        assert parameters == dict(inspect.signature(getattr(cpu, name)).parameters)


@pytest.mark.parametrize("name", NAMES)
def test_every_function_hands_its_arguments_on_and_asks_first_whether_it_may(name, monkeypatch):
    values = {p: torch.zeros(1) for p in inspect.signature(getattr(cpu, name)).parameters}
    if name == "unpack":
        values["packed"] = fast.PackedState(torch.zeros(1), torch.zeros(1), None)
    if name.endswith("_slots"):
        values["native"] = fast.DenseState(torch.zeros(1), torch.zeros(1))
    stand_in = Mock()
    monkeypatch.setattr(cpu, name, stand_in)
    getattr(fast, name)(**values, impl="cpu")
    passed_on = inspect.signature(getattr(reference, name)).bind(*stand_in.call_args.args, **stand_in.call_args.kwargs)
    assert all(passed_on.arguments[p] is value for p, value in values.items())
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="Triton is not installed"):
        getattr(fast, name)(**values, impl="triton")
    assert stand_in.call_count == 1


def test_meta_tensors_are_refused():
    inputs = {p: t.to("meta") for p, t in DeltaRuleCase(1, 4, 1, 1, 2, 3, False).build().items()}
    with pytest.raises(ValueError, match="impl 'auto' cannot run for tensors on 'meta'"):
        fast.chunk_gdn(**inputs)
