"""Engines over tiny models whose free memory is always NaN, checked after every step, and answers to compare with."""

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

import dasc.reference
from dasc.cache import AtJunctions, AtPromptEnd, CacheConfig, CheckpointPolicy, check
from dasc.cache.engine import Answer, Engine, Request
from dasc.cache.storage import TensorStorage
from dasc.geometry import DtypePolicy, Quantization
from dasc.layout import LayoutKind, rank_layouts
from dasc.models.hybrid import Batch, HybridModel, SequenceInput
from tests.models.hybrid_runs import VOCAB, tiny_model

NAN = float("nan")


@cache
def serving_model(kind: str = "kda", gate: str = "softplus", dtype: torch.dtype = torch.float32) -> HybridModel:
    return tiny_model(kind, gate, num_experts=0, dtype=dtype)


def full_mask(model: HybridModel, share: float = 1.0, seed: int = 0) -> Tensor:
    """Units kept with the given chance; all of them by default."""
    shape = (model.config.geometry.num_layers, model.config.geometry.units_per_layer)
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def build(
    model: HybridModel,
    *,
    native: int = 8,
    compressed: int = 0,
    mask: Tensor | None = None,
    layout: LayoutKind = "ragged",
    quantized: Quantization | None = None,
    window: int = 0,
    refresh_below: int | None = None,
    kv_pages: int = 400,
    page_size: int = 1,
    spill: bool = True,
    watermark: int = 0,
    policies: tuple[CheckpointPolicy, ...] = (AtPromptEnd(), AtJunctions()),
    server_limit: int = 3,
    prefill_tokens: int = 16,
    storage_type: type[TensorStorage] = TensorStorage,
    **options,
) -> Engine:
    """An engine that keeps all units unless it is given a mask."""
    geometry, dtypes = model.config.geometry, DtypePolicy(model.dtype, model.dtype, quantized)
    mask = full_mask(model) if mask is None else mask
    [rank_layout] = rank_layouts(geometry, mask, kind=layout, dtypes=dtypes)
    config = CacheConfig(
        native_slots=native,
        compressed_slots=compressed,
        kv_pages=kv_pages,
        page_size=page_size,
        spill=spill,
        watermark=watermark,
        policies=policies,
        refresh_window_tokens=window,
        refresh_below_tokens=refresh_below,
    )
    storage = storage_type(
        geometry,
        native,
        dtypes,
        layout=rank_layout if compressed else None,
        compressed_slots=compressed,
        codec=dasc.reference if compressed else None,
    )
    return Engine(model, config, storage, server_limit=server_limit, prefill_tokens=prefill_tokens, **options)


def poison_free(engine: Engine) -> None:
    """What nobody holds is NaN: whoever reads a slot or page that was never written shows it."""
    ledger, storage, kv = engine.cache.ledger, engine._storage, engine._kv
    free = list(ledger.native.free_list())
    storage.temporal[:, free] = NAN
    storage.conv[:, free] = NAN
    if storage.compressed_slots:
        for slot in ledger.compressed.free_list():
            for part in storage._pool().slot(slot):
                if part is not None and part.is_floating_point():
                    part.fill_(NAN)
    free_pages = torch.from_numpy(~ledger.kv.held_mask()).repeat_interleave(ledger.kv.page_size)
    kv.rows[:, free_pages] = NAN


def checked_step(engine: Engine) -> list[Answer]:
    """A step after which the cache adds up, and what is free is NaN."""
    poison_free(engine)
    answers = engine.step()
    check(engine.cache)
    return answers


def serve(engine: Engine, conversations: Sequence[Sequence[Request]], concurrency: int = 4) -> dict[str, Answer]:
    """``Engine.run`` with every step checked; answers by request."""
    engine.step = lambda: checked_step_of(engine)
    try:
        answers = engine.run(conversations, concurrency=concurrency)
    finally:
        del engine.step
    assert engine.is_idle()
    assert not engine.cache.leases
    return {answer.request.request_id: answer for answer in answers}


def checked_step_of(engine: Engine) -> list[Answer]:
    poison_free(engine)
    answers = Engine.step(engine)
    check(engine.cache)
    return answers


def tokens_of(answers: dict[str, Answer]) -> dict[str, tuple[int, ...]]:
    return {name: answer.tokens for name, answer in sorted(answers.items())}


@cache
def greedy(model: HybridModel, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The likeliest tokens, from one forward over the prompt and one for each token after it."""
    states, kv = model.new_states(1, DtypePolicy(model.dtype, model.dtype)), model.new_kv(len(prompt) + count)
    tokens, done = list(prompt), 0
    while len(tokens) < len(prompt) + count:
        new = SequenceInput(torch.tensor(tokens[done:]), done, 0, torch.arange(len(tokens)))
        done = len(tokens)
        tokens.append(int(model.forward(Batch((new,)), states, kv).argmax()))
    return tuple(tokens[len(prompt) :])


def draw_conversations(
    seed: int, count: int, turns: int, *, shared: int = 6, longest: int = 9, answer: int = 4, **options
) -> list[list[Request]]:
    """Conversations of frozen ids: half of them share their first tokens; each prompt goes on from the one before."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, VOCAB, (length,), generator=generator).tolist())

    def number(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=generator))

    system = draw(shared)
    conversations = []
    for c in range(count):
        prompt = system if c % 2 else ()
        requests = []
        for t in range(turns):
            prompt += draw(number(1, longest))
            requests.append(Request(f"{c}.{t}", prompt, number(1, answer), seed=100 * c + t, **options))
            prompt += draw(number(0, 3))  # as if recorded; the model's own answer is another
        conversations.append(requests)
    return conversations


class LogitsOf:
    """Collects the logits of every forward of an engine."""

    def __init__(self, engine: Engine) -> None:
        self.batches: list[Batch] = []
        self.logits: list[Tensor] = []
        self._forward: Callable[..., Tensor] = engine.model.forward
        self._model = engine.model
        engine.model = self  # the engine asks its model for nothing but this

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def forward(self, batch: Batch, states: object, kv: object) -> Tensor:
        self.batches.append(batch)
        self.logits.append(self._forward(batch, states, kv))
        return self.logits[-1]
