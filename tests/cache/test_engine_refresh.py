"""What a compressed hit computes with: zeroed units (DASC-NR), or units refreshed in the request's prefill (DASC-WR).

Each request is warmed up alone, then asked again; its logits are compared with an oracle built by hand.
"""

import pytest
import torch
from torch import Tensor

from dasc.cache import AtPromptEnd
from dasc.cache.engine import Request
from dasc.geometry import DtypePolicy
from dasc.models.hybrid import Batch, HybridModel, SequenceInput
from dasc.reference import RecurrentState, suffix_refresh
from tests.cache.engine_runs import LogitsOf, build, checked_step, full_mask, serving_model
from tests.models.hybrid_runs import MODELS, assert_close, isolated, random_tokens, reference_stack

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10}


def oracle(
    model: HybridModel, tokens: Tensor, hit: int, mask: Tensor, window: int = 0, window_kv: str = "replayed"
) -> Tensor:
    """Logits ``[tokens - hit, vocab]`` after a compressed hit of ``hit`` tokens, in passes of their own."""
    dtypes = DtypePolicy(model.dtype, model.dtype)
    _, states, _ = isolated(model, tokens[:hit], dtypes)
    geometry = model.config.geometry
    kept = mask.view(geometry.num_layers, geometry.num_value_heads, 1, geometry.units_per_head)
    states.temporal[:, 0] = torch.where(kept, states.temporal[:, 0], 0)
    kv = model.new_kv(len(tokens))
    kv.rows[:, :hit] = isolated(model, tokens[:hit], dtypes)[2].rows
    if window:
        refreshed = suffix_refresh(
            reference_stack(model),
            model.embedding[tokens[hit - window : hit]],
            states=[RecurrentState(t[0], c[0]) for t, c in zip(states.temporal, states.conv)],
            kv=list(kv.rows[:, :hit]),
            masks=mask,
            prefix_tokens=hit,
            window_kv=window_kv,
        )
        states.temporal[:, 0] = torch.stack([state.temporal for state in refreshed])
    new = SequenceInput(tokens[hit:], hit, 0, torch.arange(len(tokens)))
    return model.forward(Batch((new,)), states, kv, all_tokens=True)


def served(model: HybridModel, prefixes: list[Tensor], new: list[Tensor], mask: Tensor, **options) -> list[Tensor]:
    """Logits of the first answer token of each request, all of them compressed hits in one batch."""
    engine = build(model, native=6, compressed=6, mask=mask, spill=False, policies=(AtPromptEnd(),), **options)
    for n, prefix in enumerate(prefixes):
        engine.submit(Request(f"warm {n}", (*prefix.tolist(), 0), 1))
        while not engine.is_idle():
            checked_step(engine)
    seen = LogitsOf(engine)
    requests = [Request(str(n), (*p.tolist(), *x.tolist()), 1) for n, (p, x) in enumerate(zip(prefixes, new))]
    for request in requests:
        engine.submit(request)
    answers = {}
    first = {}
    while not engine.is_idle():
        answers |= {a.request.request_id: a for a in checked_step(engine)}
        for sequence, row in zip(seen.batches[-1].sequences, seen.logits[-1]):
            for request in requests:
                if len(sequence.kv_slots) == len(request.tokens) and sequence.tokens[-1] == request.tokens[-1]:
                    first[request.request_id] = row
    assert [answers[r.request_id].record.tier for r in requests] == ["compressed"] * len(requests)
    assert [answers[r.request_id].record.hit_tokens for r in requests] == [len(p) for p in prefixes]
    assert engine.steps[-1].refresh_tokens == 0
    windows = sum(step.refresh_tokens for step in engine.steps)
    assert (
        windows == sum(min(options.get("window", 0), len(p)) for p in prefixes) == engine.cache.counters.refresh_tokens
    )
    return [first[r.request_id] for r in requests]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("kind", "gate"), MODELS)
@pytest.mark.parametrize("window_kv", ["replayed", "cached"])
def test_one_pass_refresh_gives_the_logits_of_two_passes(kind: str, gate: str, window_kv: str, dtype: torch.dtype):
    """Windows off the blocks, a prefix shorter than the window, chunks, and several requests in a batch."""
    model = serving_model(kind, gate, dtype)
    mask = full_mask(model, 0.5, seed=4)
    prefixes = [random_tokens(21, 1), random_tokens(5, 2), random_tokens(13, 3)]
    new = [random_tokens(9, 4), random_tokens(2, 5), random_tokens(3, 6)]
    found = served(model, prefixes, new, mask, window=7, window_kv=window_kv, prefill_tokens=8)
    for p, x, logits in zip(prefixes, new, found):
        expected = oracle(model, torch.cat([p, x]), len(p), mask, min(7, len(p)), window_kv)[-1]
        assert_close(logits, expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("kind", "gate"), MODELS)
def test_without_refresh_only_the_omitted_units_are_missing(kind: str, gate: str, dtype: torch.dtype):
    model = serving_model(kind, gate, dtype)
    mask = full_mask(model, 0.5, seed=4)
    prefix, new = random_tokens(21, 1), random_tokens(5, 4)
    [found] = served(model, [prefix], [new], mask)
    tokens = torch.cat([prefix, new])
    assert_close(found, oracle(model, tokens, 21, mask)[-1], TOLERANCE[dtype])
    dense = isolated(model, tokens, DtypePolicy(dtype, dtype))[0][-1]
    assert (found - dense).norm() > 1e-3 * dense.norm()


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_refresh_is_for_compressed_hits_alone(kind: str):
    """A dense hit is exact and a miss has nothing to refresh."""
    model = serving_model(kind)
    engine = build(model, native=6, compressed=1, mask=full_mask(model, 0.5), window=4, policies=(AtPromptEnd(),))
    tiers = {}
    # the first leaves the state of 9 tokens compressed and, since no slot is left there, that of all 10 dense
    for name, tokens in (("first", 10), ("same", 10), ("longer", 12)):
        engine.submit(Request(name, tuple(range(tokens)), 1))
        while not engine.is_idle():
            tiers |= {a.request.request_id: (a.record.tier, a.record.hit_tokens) for a in checked_step(engine)}
    assert tiers == {"first": ("miss", 0), "same": ("compressed", 9), "longer": ("dense", 10)}
    assert [step.refresh_tokens for step in engine.steps if step.refresh_tokens] == [4]
