"""The forward pass for training equals the serving model's, and learns."""

import pytest
import torch
from hypothesis import example, given, settings

from dasc import reference
from dasc.geometry import DtypePolicy
from dasc.models.hybrid import Batch, HybridModel, SequenceInput, random_hybrid
from dasc.models.train.delta_rule import BLOCK, delta_rule
from dasc.models.train.forward import OtherStates, logits
from tests.inputs import DeltaRuleCase, delta_rule_cases
from tests.models.hybrid_runs import MODELS, random_of

FP64 = DtypePolicy(temporal=torch.float64, conv=torch.float64)


def reference_outputs(case: DeltaRuleCase, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    recurrence = reference.recurrent_kda if case.channel_gate else reference.recurrent_gdn
    return recurrence(**tensors, use_qk_l2norm=True).o


def whole_blocks(case: DeltaRuleCase) -> DeltaRuleCase:
    return DeltaRuleCase(**{**vars(case), "T": -(-max(case.T, 1) // BLOCK) * BLOCK, "with_state": False})


@given(delta_rule_cases(max_T=50))
@example(DeltaRuleCase(B=1, T=32, H=1, ratio=1, K=4, V=4, channel_gate=True, regime="mixed"))
@example(DeltaRuleCase(B=1, T=48, H=1, ratio=2, K=8, V=3, channel_gate=True, regime="repeated_keys"))
def test_outputs_are_those_of_the_recurrence(case: DeltaRuleCase):
    case = whole_blocks(case)
    tensors = case.build()
    expected = reference_outputs(case, tensors)
    assert (delta_rule(**tensors) - expected).norm() <= 1e-9 * (1 + expected.norm())


@settings(max_examples=20)
@given(delta_rule_cases(max_T=50))
@example(DeltaRuleCase(B=1, T=32, H=1, ratio=1, K=4, V=4, channel_gate=True, regime="fast"))
def test_gradients_are_finite_and_those_of_the_recurrence(case: DeltaRuleCase):
    """Faults 31 to 33: strong, zero and mixed decays."""
    case = whole_blocks(case)
    gradients = []
    for run in (lambda t: delta_rule(**t), lambda t: reference_outputs(case, t)):
        tensors = {name: tensor.requires_grad_() for name, tensor in case.build().items()}
        direction = torch.randn(case.B, case.T, case.HV, case.V, generator=torch.Generator().manual_seed(1)).double()
        gradients.append(torch.autograd.grad((run(tensors) * direction).sum(), list(tensors.values())))
    for ours, expected in zip(*gradients):
        assert torch.isfinite(ours).all()
        assert (ours - expected).norm() <= 1e-7 * (1 + expected.norm())


def test_fp32_stays_near_the_recurrence_whatever_the_decay():
    for regime in ("typical", "fast", "mixed", "slow"):
        case = DeltaRuleCase(B=1, T=128, H=2, ratio=1, K=32, V=16, channel_gate=True, regime=regime, with_state=False)
        expected = reference_outputs(case, case.build())
        ours = delta_rule(**case.build(torch.float32))
        assert ours.dtype == torch.float32
        assert (ours - expected).norm() <= 1e-5 * expected.norm(), regime


def test_other_lengths_are_refused():
    case = DeltaRuleCase(B=1, T=BLOCK + 1, H=1, ratio=1, K=4, V=4, channel_gate=False, with_state=False)
    with pytest.raises(ValueError, match=f"T must be a multiple of {BLOCK}, got {BLOCK + 1}"):
        delta_rule(**case.build())


@pytest.mark.parametrize(("kind", "gate"), MODELS)
def test_logits_are_those_of_the_served_model(kind: str, gate: str):
    config, weights = random_of(kind, gate, num_value_heads=4, num_key_heads=None if kind == "kda" else 2)
    weights = {name: weight.double() for name, weight in weights.items()}
    tokens = torch.randint(config.vocab_size, (2, 37), generator=torch.Generator().manual_seed(3))
    model = HybridModel(config, weights, reference, dtype=torch.float64)
    sequences = tuple(
        SequenceInput(tokens=row, start=0, state_slot=n, kv_slots=torch.arange(37) + 40 * n)
        for n, row in enumerate(tokens)
    )
    served = model.forward(Batch(sequences), model.new_states(2, FP64), model.new_kv(80), all_tokens=True)
    assert (logits(config, weights, tokens).flatten(0, 1) - served).abs().max() <= 1e-10


@pytest.mark.parametrize(("kind", "gate"), [("gdn", "softplus"), ("kda", "softplus"), ("kda", "safe")])
def test_sequences_go_on_with_other_states_as_the_served_model_does(kind: str, gate: str):
    """Zeros, another's, one's own."""
    config, weights = random_hybrid(kind, gate, num_value_heads=4, num_key_heads=2 if kind == "gdn" else None)
    weights = {name: weight.double() for name, weight in weights.items()}
    tokens = torch.randint(config.vocab_size, (3, 37), generator=torch.Generator().manual_seed(3))
    others = OtherStates(at=torch.tensor([21, 18, -1]), donor=torch.tensor([-1, 2, -1]))
    found, dense = logits(config, weights, tokens, others), logits(config, weights, tokens)
    assert (found[2] - dense[2]).abs().max() <= 1e-10
    for row, (at, donor) in enumerate([(21, None), (18, 2)]):
        assert (found[row, :at] - dense[row, :at]).abs().max() <= 1e-10
        assert (found[row, at:] - dense[row, at:]).abs().max() > 1e-6
        model = HybridModel(config, weights, reference, dtype=torch.float64)
        states, kv = model.new_states(2, FP64), model.new_kv(37 + at)
        contexts = [SequenceInput(tokens[row, :at], 0, 0, torch.arange(at))]
        if donor is not None:
            contexts.append(SequenceInput(tokens[donor, :at], 0, 1, torch.arange(at) + 37))
        model.forward(Batch(tuple(contexts)), states, kv)
        states.temporal[:, 0] = states.temporal[:, 1]  # of no one, zeros
        after = Batch((SequenceInput(tokens[row, at:], at, 0, torch.arange(37)),))
        assert (found[row, at:] - model.forward(after, states, kv, all_tokens=True)).abs().max() <= 1e-10
