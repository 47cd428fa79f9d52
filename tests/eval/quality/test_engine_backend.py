"""The bundled engine as a backend: who hits what, what is left behind, and which arms must say the same."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

import dasc.fast
from dasc.eval.items import Ask, Item
from dasc.eval.quality.arms import METHODS, ArmSpec, selects
from dasc.eval.quality.backend import Query, Reply, Residency
from dasc.eval.quality.engine_backend import EngineBackend, EngineLimits, as_text, kv_tokens
from dasc.eval.quality.protocol import make_blocks
from tests.eval.replay_runs import tiny_served
from tests.masks import seeded_magnitudes

SLOTS = 6
PROMPTS = [tuple(np.random.default_rng(seed).integers(0, 256, 40).tolist()) for seed in range(5)]
ARMS = [ArmSpec(m, 16 if selects(m) else None, 1234 if m == "random" else None) for m in METHODS]


def backend(spec: ArmSpec, *, slots: int = SLOTS, server_limit: int = 3, kind: str = "kda") -> EngineBackend:
    served = tiny_served(kind, dasc.fast)
    served = dataclasses.replace(served, magnitudes=seeded_magnitudes(served.checkpoint))
    limits = EngineLimits(server_limit=server_limit, prefill_tokens=64)
    return EngineBackend(served, spec, limits, slots=slots, kv_tokens=1000)


def warm(prompt: Sequence[int], name: str, repeated: bool = False) -> Query:
    return Query(f"warm {name}", tuple(prompt), 1, warm=True, repeated=repeated)


def ask(engine: EngineBackend, queries: Sequence[Query]) -> list[Reply]:
    return engine.ask(queries, 4, lambda: None)


def measured(prompts: Sequence[tuple[int, ...]], tokens: int = 5, **options) -> list[Query]:
    return [Query(f"{i}", prompt, tokens, seed=i, **options) for i, prompt in enumerate(prompts)]


def run(spec: ArmSpec, more: tuple[int, ...] = (7, 8, 9), **options) -> tuple[EngineBackend, list[Reply]]:
    """All prompts warm; each is asked with ``more`` after it."""
    engine = backend(spec, **options)
    ask(engine, [warm(prompt, str(i), repeated=not more) for i, prompt in enumerate(PROMPTS)])
    return engine, ask(engine, measured([prompt + more for prompt in PROMPTS]))


@pytest.mark.parametrize("spec", ARMS, ids=lambda spec: spec.label)
def test_all_arms_have_as_many_slots_and_hit_exactly_what_was_warmed(spec: ArmSpec):
    """One checkpoint a warm request; measured requests leave none and evict none."""
    engine, replies = run(spec)
    assert [(r.prompt_tokens, r.cached_tokens, len(r.answer)) for r in replies] == [(43, 40, 5)] * 5
    assert engine.residency() == Residency(SLOTS - 5, 0)
    assert [r.name for r in replies] == list("01234")
    engine.flush()
    assert engine.residency() == Residency(SLOTS, 0)
    assert [r.cached_tokens for r in ask(engine, measured(PROMPTS))] == [0] * 5
    engine.close()


@pytest.mark.parametrize("spec", ARMS, ids=lambda spec: spec.label)
def test_a_prompt_that_was_warmed_exactly_hits_all_but_its_last_token(spec: ArmSpec):
    engine, replies = run(spec, more=())
    assert [(r.prompt_tokens, r.cached_tokens) for r in replies] == [(40, 39)] * 5
    assert engine.residency() == Residency(SLOTS - 5, 0)
    engine.close()


def test_the_same_prompt_would_miss_the_state_after_its_end():
    """Why the last token is left out."""
    engine = backend(ArmSpec("dense"))
    ask(engine, [warm(PROMPTS[0], "0")])
    [reply] = ask(engine, measured(PROMPTS[:1]))
    assert reply.cached_tokens == 0


@pytest.mark.parametrize("more", [(), (7, 8, 9)])
@pytest.mark.parametrize("kind", ["kda", "gdn"])
def test_dense_checkpoints_change_no_answer(kind: str, more: tuple[int, ...]):
    _, replies = run(ArmSpec("dense"), more, kind=kind)
    cold = ask(backend(ArmSpec("dense"), kind=kind), measured([prompt + more for prompt in PROMPTS]))
    assert [r.answer for r in replies] == [r.answer for r in cold]


def test_observed_units_are_as_many_as_those_of_nr_and_others():
    nr, observed = (backend(ArmSpec(method, 32)) for method in ("nr", "observed"))
    assert nr.settings()["units_kept"] == observed.settings()["units_kept"]
    answers = {m: [r.answer for r in run(ArmSpec(m, 32))[1]] for m in ("nr", "observed")}
    assert answers["nr"] != answers["observed"]
    with pytest.raises(ValueError, match="magnitudes must be given for units chosen by them"):
        EngineBackend(tiny_served(), ArmSpec("observed", 32), EngineLimits(), slots=2, kv_tokens=100)


@pytest.mark.parametrize("kind", ["kda", "gdn"])
def test_padded_and_ragged_checkpoints_give_the_same_answers(kind: str):
    """And other ones than dense, so that they are tested at all."""
    answers = {m: [r.answer for r in run(ArmSpec(m, 32), kind=kind)[1]] for m in ("nr", "padded")}
    dense = [r.answer for r in run(ArmSpec("dense"), kind=kind)[1]]
    assert answers["nr"] == answers["padded"] != dense


def test_random_masks_keep_as_many_units_but_others():
    nr, *random = [backend(ArmSpec("nr", 16)), *(backend(ArmSpec("random", 16, seed)) for seed in (1234, 2027))]
    for engine in random:
        assert engine.settings() == nr.settings()
    answers = [[r.answer for r in run(ArmSpec("random", 16, seed))[1]] for seed in (1234, 2027, 1234)]
    assert answers[0] == answers[2] != answers[1]


def test_settings_tell_what_a_checkpoint_takes():
    told = {spec.label: backend(spec).settings() for spec in ARMS}
    assert told["dense"]["compression"] == 1.0
    assert told["int8-all"]["units_kept"] == told["int4-all"]["units_kept"]
    assert told["int8-all"]["units_kept"] == told["dense"]["units_kept"] == told["dense"]["units"]
    assert told["nr 16"]["units_kept"] == told["int8 16"]["units_kept"] == told["int4 16"]["units_kept"]
    assert told["nr 16"]["units_kept"] < told["dense"]["units"]
    ratios = [told[label]["compression"] for label in ("nr 16", "int8 16", "int4 16")]
    assert 1 < ratios[0] < ratios[1] < ratios[2]
    assert told["padded 16"]["checkpoint_bytes"] >= told["nr 16"]["checkpoint_bytes"]
    assert told["wr 16"]["replay_tokens"] == 16 > told["nr 16"]["replay_tokens"] == 0


@pytest.mark.parametrize("spec", [ArmSpec("dense"), ArmSpec("nr", 16)], ids=lambda spec: spec.label)
def test_more_prefixes_than_slots_evict_the_oldest(spec: ArmSpec):
    engine, replies = run(spec, slots=3)
    assert [r.cached_tokens for r in replies] == [0, 0, 40, 40, 40]
    assert engine.residency() == Residency(0, 2)


def test_a_warm_prompt_is_computed_from_nothing_even_if_another_one_begins_it():
    """Else its checkpoint would be made from a compressed one."""
    engine = backend(ArmSpec("nr", 16))
    ask(engine, [warm(PROMPTS[0], "first")])
    [reply] = ask(engine, [warm(PROMPTS[0] + (1, 2, 3), "second")])
    assert reply.cached_tokens == 0


def test_drawn_answers_follow_the_seed():
    hot = [ask(backend(ArmSpec("dense")), measured(PROMPTS[:2], 8, temperature=1.0)) for _ in range(2)]
    assert [r.answer for r in hot[0]] == [r.answer for r in hot[1]]
    greedy = ask(backend(ArmSpec("dense")), measured(PROMPTS[:2], 8))
    assert [r.answer for r in hot[0]] != [r.answer for r in greedy]


def test_text_is_read_and_answered_as_bytes():
    engine = backend(ArmSpec("dense"))
    ask(engine, [Query("w", "a text ", 1, warm=True)])
    [reply] = ask(engine, [Query("q", "a text é", 4)])
    assert (reply.prompt_tokens, reply.cached_tokens) == (9, 7)
    assert isinstance(reply.answer, str)
    assert as_text((104, 105, 300, 195)) == "hi\ufffd\ufffd"


def test_kv_holds_a_blocks_prefixes_once_and_all_running_requests():
    """By hand: the larger block has prefixes of 8 and 4 tokens, and 2 requests of 8 + 3 + 5."""
    items = [
        Item("a", "t", (1,) * 8, (Ask((1,) * 8, ((1,),)), Ask((1,) * 11, ((1,),))), "exact", 5),
        Item("b", "t", (1,) * 8, (Ask((1,) * 9, ((1,),)),), "exact", 5),
        Item("c", "t", (2,) * 4, (Ask((2,) * 5, ((1,),)),), "exact", 5),
        Item("d", "t", (3,) * 8, (Ask((3,) * 9, ((1,),)),), "exact", 5),
    ]
    assert kv_tokens(make_blocks(items, 3), 2) == 8 + 4 + 2 * 16
