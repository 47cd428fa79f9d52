"""What arms leave of a cached prefix, and that the cache's engine answers the same from the same."""

import pytest
import torch

import dasc.reference
from dasc.cache import AtPromptEnd
from dasc.cache.engine import Request
from dasc.eval.states import (
    ask,
    prefixes,
    refresh,
    retain,
    zero_both,
    zero_full_kv,
    zero_linear,
    zero_temporal,
)
from dasc.geometry import Quantization
from dasc.models.tasks import Question
from tests.cache.engine_runs import LogitsOf, build, checked_step
from tests.eval.states.runs import constant_mask, contexts, draw_mask, model_of, prefixes_of, questions, tokens
from tests.eval.states.test_prefixes import same
from tests.models.hybrid_runs import MODELS, assert_close

PARTS = ("temporal", "conv", "kv")


@pytest.mark.parametrize(
    ("arm", "zeroed"),
    [
        (zero_full_kv, {"kv"}),
        (zero_temporal, {"temporal"}),
        (zero_linear, {"temporal", "conv"}),
        (zero_both, {"temporal", "conv", "kv"}),
    ],
)
def test_an_arm_zeroes_what_it_says_of_a_copy_and_nothing_else(arm, zeroed: set[str]):
    held = prefixes_of("kda")
    before = {name: getattr(held, name).clone() for name in PARTS}
    changed = arm(held)
    for name in PARTS:
        expected = torch.zeros_like(before[name]) if name in zeroed else before[name]
        assert torch.equal(getattr(changed, name), expected), name
        assert torch.equal(getattr(held, name), before[name]), name
        assert before[name].any(), name
    assert not torch.equal(ask(changed, questions()).token_log_prob, ask(held, questions()).token_log_prob)


@pytest.mark.parametrize("codec", [dasc.fast, dasc.reference])
@pytest.mark.parametrize(("kind", "gate"), MODELS)
def test_retaining_all_units_is_the_dense_baseline_bit_by_bit(kind: str, gate: str, codec):
    held = prefixes_of(kind, gate)
    assert same(retain(held, constant_mask(held.model, True), codec=codec), held)


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_retaining_no_unit_is_the_zeroed_temporal_state(kind: str):
    held = prefixes_of(kind)
    assert same(retain(held, constant_mask(held.model, False)), zero_temporal(held))


@pytest.mark.parametrize(("kind", "gate"), MODELS)
def test_retaining_some_units_multiplies_the_state_by_the_mask(kind: str, gate: str):
    held = prefixes_of(kind, gate)
    geometry, mask = held.model.config.geometry, draw_mask(held.model)
    kept = mask.view(geometry.num_layers, 1, geometry.num_value_heads, 1, geometry.units_per_head)
    changed = retain(held, mask)
    assert torch.equal(changed.temporal, held.temporal * kept)
    assert torch.equal(changed.conv, held.conv)
    assert changed.kv is held.kv


@pytest.mark.parametrize(("quantized", "qmax"), [("int8", 127), ("int4", 7)])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_quantised_is_the_stored_format(kind: str, quantized: Quantization, qmax: int):
    """Every element lies on its scale's grid (eq. 8), and within half a step of what it was."""
    held = prefixes_of(kind)
    loaded = retain(held, constant_mask(held.model, True), quantized=quantized)
    scales = held.temporal.abs().amax(dim=-2, keepdim=True).float().clamp(min=1e-8) / qmax
    steps = loaded.temporal / scales
    assert (steps - steps.round()).abs().max() < 1e-4
    assert ((loaded.temporal - held.temporal).abs() <= 0.5001 * scales).all()
    assert not torch.equal(loaded.temporal, held.temporal)
    expected = retain(held, constant_mask(held.model, True), quantized=quantized, codec=dasc.reference)
    assert_close(loaded.temporal, expected.temporal, 1e-6)


@pytest.mark.parametrize("window_kv", ["replayed", "cached"])
@pytest.mark.parametrize(("kind", "gate"), MODELS)
def test_a_window_over_the_whole_prefix_restores_the_dense_state_to_rounding(kind: str, gate: str, window_kv: str):
    """To 1e-10 in FP64: the same sums, in blocks of another length."""
    held = prefixes_of(kind, gate)
    mask = draw_mask(held.model, 0.3)
    before = retain(held, mask)
    restored = refresh(before, mask, 30, window_kv=window_kv)
    assert_close(restored.temporal, held.temporal)
    assert torch.equal(restored.conv, held.conv)
    assert same(before, retain(held, mask))


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_a_window_leaves_stored_units_and_makes_the_others_anew(kind: str):
    held = prefixes_of(kind)
    geometry, mask = held.model.config.geometry, draw_mask(held.model)
    kept = mask.view(geometry.num_layers, 1, geometry.num_value_heads, 1, geometry.units_per_head)
    kept = kept.expand_as(held.temporal)
    refreshed = refresh(retain(held, mask), mask, 6)
    assert torch.equal(refreshed.temporal[kept], held.temporal[kept])
    long = [0, 1, 3]  # the third prefix is shorter than the window
    off = (refreshed.temporal - held.temporal)[:, long][~kept[:, long]]
    assert 0 < off.norm() < held.temporal[:, long][~kept[:, long]].norm()


def test_without_a_window_nothing_is_refreshed():
    held = prefixes_of("kda")
    assert refresh(held, draw_mask(held.model), 0) is held
    with pytest.raises(ValueError, match="window_tokens must be 0 or more, got -1"):
        refresh(held, draw_mask(held.model), -1)


def test_windows_are_refreshed_the_same_however_many_run_together(monkeypatch: pytest.MonkeyPatch):
    held = prefixes_of("gdn")
    mask = draw_mask(held.model)
    whole = refresh(retain(held, mask), mask, 6)
    monkeypatch.setattr(prefixes, "_BATCH_TOKENS", 1)
    assert_close(refresh(retain(held, mask), mask, 6).temporal, whole.temporal)


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("quantized", [None, "int8", "int4"])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_the_engine_answers_the_same_from_its_compressed_checkpoints(
    kind: str, quantized: Quantization | None, window: int
):
    """NR and WR, exact and quantised: what a greedy answer says, and the logits of each of its tokens."""
    model, prompt = model_of(kind), tokens(3, 70)
    mask = draw_mask(model)
    engine = build(
        model,
        native=6,
        compressed=6,
        mask=mask,
        quantized=quantized,
        window=window,
        spill=False,
        policies=(AtPromptEnd(),),
    )
    said, logits = [], []
    for number, context in enumerate(contexts()):
        engine.submit(Request(f"warm {number}", (*context, 0), 1))
        while not engine.is_idle():
            checked_step(engine)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "model", model)
            seen = LogitsOf(engine)
            engine.submit(Request(f"asked {number}", (*context, *prompt), 3))
            answers = []
            while not engine.is_idle():
                answers += checked_step(engine)
        assert (answers[0].record.tier, answers[0].record.hit_tokens) == ("compressed", len(context))
        said.append(answers[0].tokens)
        logits.append(torch.cat(seen.logits[-3:]))
    held = prefixes_of(kind)
    arm = refresh(retain(held, mask, quantized=quantized), mask, window)
    asked = [[Question(prompt, answer)] for answer in said]
    found = ask(arm, asked, keep_logits=True)
    assert found.right.all()
    assert_close(found.logits, torch.cat(logits), 1e-6 if quantized else 1e-10)
    dense = ask(held, asked, keep_logits=True)
    assert (dense.logits - found.logits).norm() > 1e-4 * dense.logits.norm()
