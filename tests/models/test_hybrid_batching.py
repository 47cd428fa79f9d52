"""Results depend on a sequence's tokens alone: not on splits, batches, slots, or what memory held before.

Faults 9, 17 and 20 (states never written, KV without a state) are the cache's to refuse: a forward reads the slots it
is told to. Poisoned pools here show that it reads no others.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dasc.reference
from dasc.geometry import DtypePolicy
from dasc.models.hybrid import Batch, HybridModel, SequenceInput, random_hybrid
from tests.models.hybrid_runs import (
    KINDS,
    MODELS,
    Conversation,
    assert_close,
    conversations,
    isolated,
    nan_pools,
    random_tokens,
    tiny_model,
)

F32 = DtypePolicy(temporal=torch.float32, conv=torch.float32)


def assert_state_of(model, states, slot: int, tokens, tolerance: float = 1e-10):
    """The slot holds the state after exactly ``tokens``."""
    _, expected, _ = isolated(model, tokens)
    assert_close(states.temporal[:, slot], expected.temporal[:, 0], tolerance)
    assert_close(states.conv[:, slot], expected.conv[:, 0], tolerance)


@st.composite
def schedules(draw: st.DrawFn) -> list[list[int]]:
    """For each of some sequences the sizes of its pieces."""
    return draw(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=3))


@pytest.mark.parametrize(("kind", "gate"), MODELS)
@settings(max_examples=12)
@given(schedule=schedules(), seed=st.integers(0, 2**31 - 1), period=st.sampled_from([2, 3]))
def test_any_split_in_any_batch_equals_each_sequence_alone_in_one_forward(
    kind: str, gate: str, schedule: list[list[int]], seed: int, period: int
):
    model = tiny_model(kind, gate, attention_period=period)
    states, kv = nan_pools(model)
    runs = conversations([sum(pieces) for pieces in schedule], seed=seed)
    waiting = [list(pieces) for pieces in schedule]
    logits = [[] for _ in runs]
    generator = torch.Generator().manual_seed(seed)
    while any(waiting):
        ready = [n for n, pieces in enumerate(waiting) if pieces]
        order = torch.randperm(len(ready), generator=generator)[: max(1, len(ready) - seed % 2)]
        chosen = [ready[i] for i in order]
        sizes = [waiting[n].pop(0) for n in chosen]
        batch = Batch(tuple(runs[n].next(size) for n, size in zip(chosen, sizes)))
        parts = model.forward(batch, states, kv, all_tokens=True).split(sizes)
        for n, part in zip(chosen, parts):
            logits[n].append(part)
    for run, parts in zip(runs, logits):
        expected, alone, alone_kv = isolated(model, run.tokens)
        assert_close(torch.cat(parts), expected)
        assert_close(states.temporal[:, run.slot], alone.temporal[:, 0])
        assert_close(states.conv[:, run.slot], alone.conv[:, 0])
        assert_close(kv.rows[:, run.kv_slots], alone_kv.rows)


@pytest.mark.parametrize(("kind", "gate"), MODELS)
def test_state_of_each_request_is_the_one_at_its_own_boundary(kind: str, gate: str):
    """Fault 15: a batch of unequal prompts in chunks; each finishes in another round, within a chunk."""
    model = tiny_model(kind, gate)
    states, kv = nan_pools(model)
    runs = conversations([50, 70, 91])
    while any(run.done < len(run.tokens) for run in runs):
        left = [run for run in runs if run.done < len(run.tokens)]
        model.forward(Batch(tuple(run.next(min(13, len(run.tokens) - run.done)) for run in left)), states, kv)
    for run in runs:
        assert_state_of(model, states, run.slot, run.tokens)


@pytest.mark.parametrize(("kind", "gate"), MODELS)
@pytest.mark.parametrize("more", [1, 2, 3, 65])
def test_going_on_from_a_state_equals_the_run_from_the_start(kind: str, gate: str, more: int):
    """Faults 19 and 22: no shortcut for one token is taken for two, and no chunk is too small."""
    model = tiny_model(kind, gate)
    states, kv = nan_pools(model)
    (run,) = conversations([33 + more])
    model.forward(Batch((run.next(33),)), states, kv)
    logits = model.forward(Batch((run.next(more),)), states, kv, all_tokens=True)
    assert_close(logits, isolated(model, run.tokens)[0][33:])
    assert_state_of(model, states, run.slot, run.tokens)


@pytest.mark.parametrize(("kind", "gate"), MODELS)
def test_rejected_speculative_tokens_leave_the_state_as_if_they_had_never_run(kind: str, gate: str):
    """Fault 18: drafts are verified into another slot; those accepted are run again from the untouched one."""
    model = tiny_model(kind, gate)
    states, kv = nan_pools(model)
    (run,) = conversations([30])
    model.forward(Batch((run.next(20),)), states, kv)
    before = states.temporal[:, run.slot].clone(), states.conv[:, run.slot].clone()
    drafts = torch.cat([run.tokens[20:22], random_tokens(3, seed=9)])  # two right, three wrong
    verify = SequenceInput(drafts, 20, 7, run.kv_slots[:25], source_slot=run.slot)
    model.forward(Batch((verify,)), states, kv, all_tokens=True)
    assert torch.equal(states.temporal[:, run.slot], before[0])
    assert torch.equal(states.conv[:, run.slot], before[1])
    model.forward(Batch((run.next(2),)), states, kv)
    assert_state_of(model, states, run.slot, run.tokens[:22])
    logits = model.forward(Batch((run.next(8),)), states, kv)
    assert_close(logits, isolated(model, run.tokens)[0][-1:])


@pytest.mark.parametrize(("kind", "gate"), MODELS)
def test_a_slot_handed_out_again_starts_from_zero(kind: str, gate: str):
    """Fault 11: neither the last owner's state nor NaN shows."""
    model = tiny_model(kind, gate)
    states, kv = nan_pools(model)
    tokens = random_tokens(11, seed=1)
    for content in (float("nan"), 3.0):
        states.temporal.fill_(content)
        states.conv.fill_(content)
        logits = model.forward(Batch((SequenceInput(tokens, 0, 4, torch.arange(11)),)), states, kv, all_tokens=True)
        assert_close(logits, isolated(model, tokens)[0])


def test_two_requests_go_on_from_one_shared_checkpoint_which_stays_as_it_is():
    model = tiny_model()
    states, kv = nan_pools(model)
    (shared,) = conversations([21])
    model.forward(Batch((shared.next(21),)), states, kv)
    before = states.temporal[:, shared.slot].clone()
    tails = [random_tokens(5, seed=50), random_tokens(2, seed=51)]
    free = sorted(set(range(400)) - set(shared.kv_slots.tolist()))
    batch = Batch(
        tuple(
            SequenceInput(
                tail,
                21,
                5 + n,
                torch.cat([shared.kv_slots, torch.tensor(free[10 * n : 10 * n + len(tail)])]),
                source_slot=shared.slot,
            )
            for n, tail in enumerate(tails)
        )
    )
    logits = model.forward(batch, states, kv)
    for n, tail in enumerate(tails):
        tokens = torch.cat([shared.tokens, tail])
        assert_close(logits[n], isolated(model, tokens)[0][-1])
        assert_state_of(model, states, 5 + n, tokens)
    assert torch.equal(states.temporal[:, shared.slot], before)


def test_memory_that_is_not_addressed_stays_bit_identical():
    model = tiny_model("kda")
    states, kv = nan_pools(model)
    runs = conversations([9, 4])
    model.forward(Batch(tuple(run.next(len(run.tokens)) for run in runs)), states, kv)
    others = [slot for slot in range(8) if slot not in (1, 2)]
    assert states.temporal[:, others].isnan().all()
    assert states.conv[:, others].isnan().all()
    unwritten = torch.ones(400, dtype=torch.bool)
    unwritten[torch.cat([run.kv_slots for run in runs])] = False
    assert kv.rows[:, unwritten].isnan().all()
    assert not kv.rows[:, ~unwritten].isnan().any()


@pytest.mark.parametrize(("kind", "gate"), MODELS)
def test_greedy_tokens_in_fp32_do_not_depend_on_batch_and_chunks(kind: str, gate: str):
    model = tiny_model(kind, gate, dtype=torch.float32)
    prompts = [random_tokens(length, seed=length) for length in (5, 17, 30)]

    def generate(chunk: int, together: bool) -> list[list[int]]:
        groups = [[0, 1, 2]] if together else [[0], [1], [2]]
        answers: list[list[int]] = [[], [], []]
        for group in groups:
            states, kv = nan_pools(model, dtypes=F32)
            runs = {n: Conversation(n, prompts[n], torch.arange(100 * n, 100 * n + 99)) for n in group}
            while any(len(answers[n]) < 16 for n in group):
                batch = []
                for n in group:
                    run = runs[n]
                    batch.append(run.next(min(chunk, len(run.tokens) - run.done)))
                for n, token in zip(group, model.forward(Batch(tuple(batch)), states, kv).argmax(dim=1).tolist()):
                    if runs[n].done == len(runs[n].tokens):
                        answers[n].append(token)
                        runs[n].tokens = torch.cat([runs[n].tokens, torch.tensor([token])])
        return [answer[:16] for answer in answers]

    expected = generate(100, together=False)
    assert len({token for answer in expected for token in answer}) > 8  # the model says something
    assert generate(100, together=True) == expected
    assert generate(4, together=True) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpoints_and_kv_take_the_dtype_of_the_pools(dtype: torch.dtype):
    """Fault 24. Rounding to the pools' dtypes happens at the boundary alone."""
    model = tiny_model("kda")
    states, kv = nan_pools(model, dtypes=DtypePolicy(temporal=torch.float32, conv=dtype))
    (run,) = conversations([20])
    model.forward(Batch((run.next(20),)), states, kv)
    _, expected, _ = isolated(model, run.tokens)
    assert (states.temporal.dtype, states.conv.dtype) == (torch.float32, dtype)
    assert torch.equal(states.temporal[:, 1], expected.temporal[:, 0].float())
    assert torch.equal(states.conv[:, 1], expected.conv[:, 0].to(dtype))


@pytest.mark.parametrize(("kind", "gate"), KINDS)
def test_the_recurrence_is_stepped_when_every_sequence_has_one_token_and_chunked_otherwise(kind: str, gate: str):
    """Decoding pays for no block; one longer sequence in the batch makes it a prefill."""
    config, weights = random_hybrid(kind, gate, num_blocks=2, attention_period=2)
    calls = []

    class Recorded:
        def __getattr__(self, name: str):
            def call(*args: object, **options: object) -> object:
                calls.append(name)
                return getattr(dasc.reference, name)(*args, **options)

            return call

    model = HybridModel(config, weights, Recorded())
    states, kv = model.new_states(4), model.new_kv(40)
    runs = conversations([6, 6], kv_slots=40)
    for sizes, form in (((1, 1), "recurrent"), ((1, 2), "chunk"), ((4, 3), "chunk")):
        calls.clear()
        model.forward(Batch(tuple(run.next(size) for run, size in zip(runs, sizes))), states, kv)
        assert [name for name in calls if name.endswith(kind)] == [f"{form}_{kind}"]


def test_last_token_logits_are_those_of_all_tokens():
    model = tiny_model("kda", "safe")
    states, kv = nan_pools(model)
    runs = conversations([7, 1, 4])
    last = model.forward(Batch(tuple(run.next(len(run.tokens)) for run in runs)), states, kv)
    for run in runs:
        run.done = 0
    every = model.forward(Batch(tuple(run.next(len(run.tokens)) for run in runs)), states, kv, all_tokens=True)
    assert_close(last, every[[6, 7, 11]])


def sequence(**changes) -> SequenceInput:
    arguments = {"tokens": torch.arange(3), "start": 5, "state_slot": 1, "kv_slots": torch.arange(8)}
    return SequenceInput(**{**arguments, **changes})


MASK = torch.ones(2, 4, dtype=torch.bool)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: sequence(tokens=torch.tensor([], dtype=torch.int64)), "tokens must hold at least one"),
        (lambda: sequence(tokens=torch.ones(3)), "tokens must be a 1-D int64 tensor, got torch.float32"),
        (lambda: sequence(kv_slots=torch.arange(7)), "kv_slots must be 8 slots, one a position, got 7"),
        (lambda: sequence(start=-1), "start must be"),
        (lambda: sequence(window=torch.arange(6)), "start must be at least the window's 6 tokens, got 5"),
        (lambda: Batch(()), "sequences must hold at least one"),
        (lambda: Batch((sequence(),), window_kv="both"), "window_kv must be 'replayed' or 'cached', got 'both'"),
        (lambda: Batch((sequence(window=torch.arange(2)),)), "global_units must be given"),
        (lambda: Batch((sequence(), sequence(kv_slots=torch.arange(10, 18)))), "state_slot must differ"),
        (lambda: Batch((sequence(), sequence(state_slot=2))), "kv_slots of new tokens must differ"),
        (
            lambda: Batch((sequence(), sequence(state_slot=2, source_slot=1, kv_slots=torch.arange(10, 18)))),
            "source_slot 1 is written by another",
        ),
    ],
)
def test_a_wrong_batch_is_refused_with_what_was_expected(build, message: str):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (Batch((sequence(tokens=torch.tensor([0, 1, 97])),)), r"tokens must be in \[0, 97\), got 0 to 97"),
        (Batch((sequence(tokens=torch.tensor([-1, 1, 2])),)), r"tokens must be in \[0, 97\), got -1 to 2"),
        (Batch((sequence(state_slot=8),)), r"state slots must be in \[0, 8\), got 8"),
        (Batch((sequence(source_slot=-1),)), r"state slots must be in \[0, 8\), got -1"),
        (Batch((sequence(kv_slots=torch.arange(395, 403)),)), r"kv_slots must be in \[0, 400\), got 395 to 402"),
        (Batch((sequence(window=torch.tensor([97])),), global_units=MASK), r"tokens must be in \[0, 97\), got 0 to 97"),
        (Batch((sequence(),), global_units=MASK[:, :3]), "mask must be torch.bool"),
    ],
)
def test_what_does_not_fit_model_and_pools_is_refused_before_anything_is_written(batch: Batch, message: str):
    model = tiny_model()
    states, kv = nan_pools(model)
    with pytest.raises(ValueError, match=message):
        model.forward(batch, states, kv)
    assert kv.rows.isnan().all()
    assert states.temporal.isnan().all()


def test_pools_of_another_model_are_refused():
    model, other = tiny_model(), tiny_model("kda")
    states, kv = nan_pools(model)
    other_states, other_kv = nan_pools(other)
    (run,) = conversations([3])
    batch = Batch((run.next(3),))
    with pytest.raises(ValueError, match=r"states.temporal must be \[2, 8, 4, 8, 4\], got \[2, 8, 2, 8, 8\]"):
        model.forward(batch, other_states, kv)
    with pytest.raises(ValueError, match=r"kv.rows must be \[2, 400, 32\], got \[2, 400, 20\]"):
        model.forward(batch, states, other_kv)
