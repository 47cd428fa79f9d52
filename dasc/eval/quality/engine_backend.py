"""The bundled engine as a backend: a small hybrid model on this machine, real states through the real cache.

Every arm has the same number of checkpoint slots, whatever a slot takes (appendix C.2). A warm request leaves one
checkpoint, after its prompt and computed from nothing, and no other request does: measured ones store nothing, so that
each is served by what was warmed and none can evict it.

The cache always leaves a token of the prompt to compute, so that a prompt cached whole is not served by the state
after it. Where the prompt that is measured is the very one that was warmed, the last token is therefore left out of the
warm request: the checkpoint lies before it, as :class:`~dasc.cache.checkpoints.AtPromptEnd` has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dasc.accounting import checkpoint_compression
from dasc.cache.checkpoints import AfterPrompt
from dasc.cache.config import CacheConfig
from dasc.cache.engine import Engine, Request
from dasc.cache.storage import TensorStorage
from dasc.eval.chat_tokens import ByteTokens
from dasc.eval.items import Item, Text
from dasc.eval.quality.arms import METHODS, ArmSpec
from dasc.eval.quality.backend import BackendError, Query, Reply, Residency
from dasc.eval.quality.protocol import Block
from dasc.eval.replay_arms import plan_arm
from dasc.eval.served_model import ServedModel, state_dtypes
from dasc.layout import Layout
from dasc.plan import MIN_WINDOW_TOKENS


def as_tokens(text: Text) -> tuple[int, ...]:
    """Token ids as they are; text as its UTF-8 bytes, which models with a byte vocabulary read."""
    return tuple(ByteTokens().text(text)) if isinstance(text, str) else text


def as_text(tokens: Sequence[int]) -> str:
    """Text of byte tokens; what is no byte, or no UTF-8, becomes a replacement character."""
    return b"".join(bytes([t]) if t < 256 else b"\xff" for t in tokens).decode(errors="replace")


def kv_tokens(blocks: Sequence[Block], server_limit: int) -> int:
    """Tokens of KV that every block's warm prefixes and running requests take."""

    def fed(item: Item) -> int:
        return max(len(as_tokens(ask.prompt)) for ask in item.asks) + item.max_new_tokens

    longest = max(fed(item) for block in blocks for item in block.items)
    warm = max(sum(len(as_tokens(warm)) for warm in {item.warm for item in block.items}) for block in blocks)
    return warm + server_limit * longest


@dataclass(frozen=True)
class EngineLimits:
    """How the bundled engine runs, whatever the arm.

    Attributes:
        server_limit: most running requests.
        prefill_tokens: most prompt tokens of a step.
        ops: operators, of :mod:`dasc.fast` or :mod:`dasc.reference`.
        threads: of torch.
    """

    server_limit: int = 16
    prefill_tokens: int = 512
    ops: Literal["fast", "reference"] = "fast"
    threads: int = 1


class EngineBackend:
    """Serves one arm with the bundled engine.

    Args:
        served: the model.
        spec: the arm.
        limits: what all arms have in common.
        slots: checkpoint slots.
        kv_tokens: tokens of KV.
    """

    def __init__(self, served: ServedModel, spec: ArmSpec, limits: EngineLimits, *, slots: int, kv_tokens: int) -> None:
        model, arm = served.model, METHODS[spec.method]
        geometry, dtypes = model.config.geometry, state_dtypes(model, quantized=arm.quantized)
        layout: Layout | None = None
        self._window = 0
        if arm.compressed:
            layout, self._window = plan_arm(
                arm, spec.w_max or MIN_WINDOW_TOKENS, served, dtypes, mask_seed=spec.mask_seed or 0
            )
        compressed_slots = 0 if layout is None else slots
        native_slots = limits.server_limit + (slots if layout is None else 1)
        try:
            storage = TensorStorage(
                geometry,
                native_slots,
                dtypes,
                layout=layout,
                compressed_slots=compressed_slots,
                codec=served.codec,
                device=model.device,
            )
            config = CacheConfig(
                native_slots=native_slots,
                compressed_slots=compressed_slots,
                kv_pages=kv_tokens,
                spill=arm.spill,
                policies=(AfterPrompt(),),
                native_slot_bytes=storage.native_slot_bytes,
                compressed_slot_bytes=max(storage.compressed_slot_bytes, 1),
                max_dense_bytes=slots * storage.native_slot_bytes,
                refresh_window_tokens=self._window,
            )
            self._engine = Engine(
                model, config, storage, server_limit=limits.server_limit, prefill_tokens=limits.prefill_tokens
            )
        except (MemoryError, RuntimeError) as error:  # torch knows no more particular error on the CPU
            raise ValueError(f"arm {spec.label}: no memory for {slots} slots and {kv_tokens} tokens of KV") from error
        self._slots = slots
        self._settings = {
            "checkpoint_bytes": geometry.dense_bytes(dtypes) if layout is None else layout.slot_bytes,
            "compression": 1.0 if layout is None else checkpoint_compression(geometry, [layout]),
            "units_kept": geometry.num_units if layout is None else layout.retained_units,
            "units": geometry.num_units,
            "replay_tokens": self._window,
        }

    def flush(self) -> None:
        """Empty the cache."""
        left = self._engine.cache.flush()
        if left:
            raise BackendError(f"{left} checkpoints are still in use and cannot be flushed")

    def ask(self, queries: Sequence[Query], concurrency: int, on_reply: Callable[[], None]) -> list[Reply]:
        """Continuous batching over all of them."""
        requests = [[_request(query)] for query in queries]
        answers = self._engine.run(requests, concurrency=concurrency, on_answer=lambda answer: on_reply())
        self._engine.steps.clear()
        self._engine.transfers.clear()
        by_name = {answer.request.request_id: answer for answer in answers}
        replies = []
        for query in queries:
            answer = by_name[query.name]
            replies.append(
                Reply(
                    name=query.name,
                    answer=as_text(answer.tokens) if isinstance(query.prompt, str) else answer.tokens,
                    prompt_tokens=answer.record.prompt_tokens,
                    cached_tokens=answer.record.hit_tokens,
                    finish="length",
                    ttft_s=answer.record.ttft_s,
                )
            )
        return replies

    def residency(self) -> Residency:
        """Slots that hold no checkpoint, and all evictions so far but those of flushes."""
        store, evictions = self._engine.cache.ledger.store, self._engine.cache.counters.evictions
        store.settle()
        held = store.dense_count + store.compressed_count
        return Residency(self._slots - held, sum(evictions.values()) - evictions["flush"])

    def settings(self) -> dict[str, Any]:
        """Bytes and units of a checkpoint, and what a refresh replays."""
        return dict(self._settings)

    def close(self) -> None:
        """Nothing runs in the background."""
        self._engine.close()


def _request(query: Query) -> Request:
    tokens = as_tokens(query.prompt)
    if query.repeated and len(tokens) > 1:
        tokens = tokens[:-1]
    return Request(
        request_id=query.name,
        tokens=tokens,
        max_new_tokens=query.max_new_tokens,
        temperature=query.temperature,
        seed=query.seed,
        lookup=not query.warm,
        store=query.warm,
    )
