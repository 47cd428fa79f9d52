"""The same conversations in dasc's own engine: what SGLang's answers are held against."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

import dasc.fast
from dasc.cache.checkpoints import AfterPrompt
from dasc.cache.config import CacheConfig
from dasc.cache.engine import Engine, Request
from dasc.cache.storage import TensorStorage
from dasc.geometry import DtypePolicy
from dasc.layout import rank_layouts
from dasc.models.hybrid import Batch, HybridModel, KVPool, StatePool, WindowKV, attention, load_hybrid
from dasc.plan import SelectionPlan
from tests.sglang.engines import Turn

SLOTS = 256
KV_TOKENS = 1 << 15


class RecordingModel(HybridModel):
    """Keeps the logits of each forward, ``[sequences, vocab]``."""

    def forward(self, batch: Batch, states: StatePool, kv: KVPool, **options: bool) -> Tensor:
        if not hasattr(self, "recorded"):
            self.recorded: list[Tensor] = []
        logits = super().forward(batch, states, kv, **options)
        self.recorded.append(logits)
        return logits


@dataclass(frozen=True)
class PeerAnswer:
    """What a request was answered.

    Attributes:
        cached_tokens: of the prompt, served from the cache.
        tokens: generated.
        log_probabilities: of the whole vocabulary for each generated token, ``[tokens, vocab]`` float64.
    """

    cached_tokens: int
    tokens: list[int]
    log_probabilities: Tensor = field(repr=False)


def converse(
    folder: Path,
    conversations: Sequence[Sequence[Turn]],
    *,
    plan: SelectionPlan | None = None,
    cached: bool = True,
    refresh: bool = False,
    window_kv: WindowKV = "replayed",
    dtype: torch.dtype = torch.float64,
) -> list[list[PeerAnswer]]:
    """Play conversations one request at a time on a server with room for all their checkpoints.

    States are stored where SGLang's ``no_buffer`` strategy stores them: after each prompt and each answer.

    Args:
        folder: of the model.
        conversations: turns of each.
        plan: store compressed checkpoints by it, and those alone; dense ones without.
        cached: use what is cached.
        refresh: replay the windows of ``plan`` on compressed hits (DASC-WR).
        window_kv: what their tokens attend to, see :class:`~dasc.models.hybrid.Batch`.
        dtype: that the model computes in and states have.
    """
    config, weights = load_hybrid(folder)
    model = RecordingModel(config, weights, dasc.fast, dtype=dtype)
    dtypes = DtypePolicy(dtype, dtype)
    layout = None
    if plan is not None:
        [layout] = rank_layouts(plan.geometry, plan.mask, kind=plan.layout, dtypes=dtypes)
    compressed = 0 if plan is None else SLOTS
    storage = TensorStorage(config.geometry, SLOTS, dtypes, layout=layout, compressed_slots=compressed, codec=dasc.fast)
    settings = CacheConfig(
        native_slots=SLOTS,
        compressed_slots=compressed,
        kv_pages=KV_TOKENS,
        spill=plan is None,
        refresh_window_tokens=int(plan.windows.max()) if refresh and plan is not None else 0,
        policies=(AfterPrompt(),),
    )
    engine = Engine(model, settings, storage, server_limit=1, prefill_tokens=KV_TOKENS, window_kv=window_kv)
    # transformers builds the norms inside latent attention with its default epsilon, SGLang with the configuration's
    latent_eps = mock.patch.object(attention, "LATENT_NORM_EPS", config.norm_eps)
    with closing(engine), latent_eps:
        return [_play(engine, model, number, turns, cached) for number, turns in enumerate(conversations)]


def _play(engine: Engine, model: RecordingModel, number: int, turns: Sequence[Turn], cached: bool) -> list[PeerAnswer]:
    history: list[int] = []
    answers = []
    for turn_number, turn in enumerate(turns):
        history += turn.tokens
        engine.submit(Request(f"{number}.{turn_number}", tuple(history), turn.new_tokens, lookup=cached))
        model.recorded = []
        done = []
        while not done:
            done = engine.step()
        [answer] = done
        logits = torch.cat(model.recorded[-turn.new_tokens :]).double()
        answers.append(PeerAnswer(answer.record.hit_tokens, list(answer.tokens), logits.log_softmax(-1)))
        history += answer.tokens
    return answers
