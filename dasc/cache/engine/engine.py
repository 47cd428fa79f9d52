"""Continuous batching over a hybrid model, every request through the cache."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Hashable, Iterator, Sequence

from torch import Tensor

from dasc.cache.config import CacheConfig
from dasc.cache.engine.chunks import Chunk, plan_chunks
from dasc.cache.engine.recording import RecordingMover
from dasc.cache.engine.request import Answer, Request, Running, Waiting
from dasc.cache.entries import Tier
from dasc.cache.lease import Backpressure
from dasc.cache.prefix_cache import PrefixCache
from dasc.cache.records import StepRecord, TransferRecord
from dasc.cache.storage import TensorStorage
from dasc.cache.transfers import InlineMover, Mover, StateStorage, TransferError
from dasc.models.hybrid import Batch, HybridModel, SequenceInput, StatePool, WindowKV


class Engine:
    """Serves requests in the order they come, a few at a time, all of them in one forward a step.

    A request waits in the queue until the server limit and the cache let it in. Then its prompt is computed in chunks,
    which stop exactly where a checkpoint is due, and its answer token by token. A compressed hit is refreshed within
    its first forward when the cache's configuration has a refresh window (DASC-WR).

    What a request is answered depends on no other request and on no chunk, but for rounding, as long as the states'
    dtypes hold what the model computes: convolution rows in BF16 do not when it computes in FP32.

    Attributes:
        model: what is served.
        cache: for reading.
        steps: a record of each forward.
        transfers: a record of each transfer of state data.

    Args:
        model: runs on pools that the engine owns; its device is that of ``storage``.
        config: of the cache; ``refresh_window_tokens`` is the longest window of the plan for DASC-WR, 0 for DASC-NR;
            with ``refresh_below_tokens``, either of them hit by hit.
        storage: with the slots of ``config``.
        server_limit: most running requests.
        prefill_tokens: most prompt tokens a step.
        window_kv: what replay tokens attend to, see :class:`~dasc.models.hybrid.Batch`.
        mover_type: decides when demotions run; :class:`~dasc.cache.transfers.ThreadMover` has them in the background.
        clock: seconds.

    Raises:
        ValueError: for limits below 1, or a storage that does not fit ``config``.
    """

    def __init__(
        self,
        model: HybridModel,
        config: CacheConfig,
        storage: TensorStorage,
        *,
        server_limit: int,
        prefill_tokens: int,
        window_kv: WindowKV = "replayed",
        mover_type: Callable[[StateStorage], Mover] = InlineMover,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if server_limit < 1 or prefill_tokens < 1:
            raise ValueError(f"server_limit and prefill_tokens must be >= 1, got {server_limit} and {prefill_tokens}")
        slots = (config.native_slots, config.compressed_limit)
        if (storage.native_slots, storage.compressed_slots) != slots:
            raise ValueError(
                f"storage must have {slots} native and compressed slots, "
                f"got {(storage.native_slots, storage.compressed_slots)}"
            )
        self.model = model
        self._storage, self._window_kv = storage, window_kv
        self._server_limit, self._prefill_tokens = server_limit, prefill_tokens
        self._mover = RecordingMover(storage, mover_type, clock)
        self.cache = PrefixCache(config, self._mover, clock=clock)
        self._mover.counters = self.cache.counters
        self._states = StatePool(storage.temporal, storage.conv)
        self._kv = model.new_kv(config.kv_pages * config.page_size)
        self._clock = clock
        self._started = clock()
        self._queue: collections.deque[Waiting] = collections.deque()
        self._running: dict[Hashable, Running] = {}  # in order of admission
        self.steps: list[StepRecord] = []

    @property
    def transfers(self) -> list[TransferRecord]:
        return self._mover.records

    def is_idle(self) -> bool:
        """Nothing waits and nothing runs."""
        return not self._queue and not self._running

    # -- requests -------------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: for a name in use, token ids that the model does not have, or more tokens than all of KV holds.
        """
        name, vocabulary, kv = request.request_id, self.model.config.vocab_size, self.cache.ledger.kv
        if name in self._running or any(w.request.request_id == name for w in self._queue):
            raise ValueError(f"request_id {name!r} is already in use")
        if not 0 <= min(request.tokens) <= max(request.tokens) < vocabulary:
            raise ValueError(
                f"tokens of request {name!r} must be in [0, {vocabulary}), "
                f"got {min(request.tokens)} to {max(request.tokens)}"
            )
        if kv.pages_for(request.fed_tokens) > kv.pages:
            raise ValueError(
                f"request {name!r} takes {request.fed_tokens} tokens of KV, but there are {kv.pages * kv.page_size}"
            )
        self._queue.append(Waiting(request, self._clock() - self._started, request.lookup))

    def abort(self, request_id: Hashable) -> None:
        """Drop a request that waits or runs. The checkpoints it has left stay.

        Raises:
            ValueError: for a request that does neither.
        """
        if request_id in self._running:
            self._drop(request_id)
            return
        for waiting in self._queue:
            if waiting.request.request_id == request_id:
                self._queue.remove(waiting)
                return
        raise ValueError(f"request_id {request_id!r} neither waits nor runs")

    def _drop(self, request_id: Hashable) -> None:
        """End a request if it still runs. One that was interrupted while it finished may be gone from the cache."""
        self._running.pop(request_id, None)
        if request_id in self.cache.leases:
            self.cache.abort(request_id)

    def close(self) -> None:
        """End the background thread. The engine cannot be used any more."""
        self._mover.close()

    def run(
        self,
        conversations: Sequence[Sequence[Request]],
        *,
        concurrency: int,
        on_answer: Callable[[Answer], None] = lambda answer: None,
    ) -> list[Answer]:
        """Serve ``concurrency`` clients: each takes the next conversation and sends its requests one after the other.

        Times of the answers count from the start of this call.

        Args:
            conversations: in the order in which clients take them.
            concurrency: clients.
            on_answer: called with each answer as it comes.

        Returns:
            The answers in order of completion.

        Raises:
            ValueError: for no clients, an engine that is not idle, or as ``submit``. Whatever is raised, what waits or
                runs then is dropped.
        """
        if concurrency < 1 or not self.is_idle():
            raise ValueError(
                f"concurrency must be >= 1 and the engine idle, got {concurrency} and is_idle()={self.is_idle()}"
            )
        untaken = collections.deque(conversations)
        clients: dict[str, Iterator[Request]] = {}  # by the request each waits for
        answers: list[Answer] = []
        self._started = self._clock()

        def client() -> Iterator[Request]:
            while untaken:
                yield from untaken.popleft()

        def send_next(requests: Iterator[Request]) -> None:
            request = next(requests, None)
            if request is not None:
                self.submit(request)
                clients[request.request_id] = requests

        try:
            for _ in range(min(concurrency, len(conversations))):
                send_next(client())
            while not self.is_idle():
                for answer in self.step():
                    answers.append(answer)
                    on_answer(answer)
                    send_next(clients.pop(answer.request.request_id))
        finally:
            self._queue.clear()
            for name in list(self._running):
                self._drop(name)
        return answers

    # -- steps ----------------------------------------------------------------------------------------------------

    def step(self) -> list[Answer]:
        """Admit what may be, run one forward and do what follows from it: checkpoints, new tokens, answers.

        When something raises on the way, be it an interruption, the requests in the forward are dropped and the error
        goes on: their states may be half-written. The others are as they were.

        Returns:
            The requests completed by this step.

        Raises:
            TransferError: when a request's state slot could not be filled, not even with zeros. That one is dropped.
        """
        self.cache.step()
        self._admit()
        chunks = plan_chunks(
            self._running.values(), self._prefill_tokens, lambda r: self.cache.next_stop(r.request.request_id)
        )
        if not chunks:
            return []
        try:
            return self._conclude(chunks, self._forward(chunks))
        except BaseException:
            for chunk in chunks:
                self._drop(chunk.running.request.request_id)
            raise

    def _admit(self) -> None:
        while self._queue and len(self._running) < self._server_limit:
            waiting = self._queue[0]
            request = waiting.request
            lease = self.cache.acquire(
                request.request_id,
                request.tokens,
                lookup=waiting.lookup,
                store=request.store,
                reserve_tokens=request.fed_tokens - len(request.tokens),
            )
            if isinstance(lease, Backpressure):
                assert self._running, "an idle server can admit any request"
                break
            self._queue.popleft()
            tier = "miss" if lease.entry is None else "compressed" if lease.entry.tier is Tier.COMPRESSED else "dense"
            window = 0
            if tier == "compressed":
                window = self.cache.config.refresh_window(lease.hit_tokens, len(request.tokens))
            self._running[request.request_id] = Running(waiting, lease, tier, window_tokens=window)
        self._take_back(self.cache.issue_loads())

    def _take_back(self, failed: list[Hashable]) -> None:
        """Queue requests again whose state could not be moved, to start from nothing."""
        lost = []
        for name in reversed([name for name in self._running if name in failed]):
            waiting = self._running.pop(name).waiting
            if waiting.lookup:
                self._queue.appendleft(dataclasses.replace(waiting, lookup=False))
            else:
                lost.append(name)
        if lost:
            raise TransferError(f"the state slots of requests {lost} could not be cleared")

    def _forward(self, chunks: list[Chunk]) -> Tensor:
        """Logits ``[chunks, vocab]`` after each chunk's last token, on the CPU."""
        started = self._clock()
        batch = Batch(
            tuple(self._sequence(c) for c in chunks),
            global_units=None if self._storage.layout is None else self._storage.layout.mask,
            window_kv=self._window_kv,
        )
        logits = self.model.forward(batch, self._states, self._kv).cpu()
        prefill = [c for c in chunks if c.prefill]
        decode = [c for c in chunks if not c.prefill]
        self.steps.append(
            StepRecord(
                prefill_tokens=sum(c.tokens for c in prefill),
                prefill_pairs=sum(c.pairs for c in prefill),
                refresh_tokens=sum(c.running.window_tokens for c in chunks),
                decode_sequences=len(decode),
                decode_pairs=sum(c.pairs for c in decode),
                seconds=self._clock() - started,
            )
        )
        return logits

    def _sequence(self, chunk: Chunk) -> SequenceInput:
        running, start = chunk.running, chunk.start
        window = running.window_tokens
        return SequenceInput(
            tokens=running.span(start, chunk.end),
            start=start,
            state_slot=running.lease.slot,
            kv_slots=running.kv_slots(chunk.end, self.cache.config.page_size),
            window=running.span(start - window, start) if window else None,
        )

    def _conclude(self, chunks: list[Chunk], logits: Tensor) -> list[Answer]:
        for chunk, row in zip(chunks, logits):
            if chunk.complete:
                chunk.running.outputs.append(chunk.running.choose(row))
        now = self._clock() - self._started
        answers = []
        for chunk in chunks:
            running, name = chunk.running, chunk.running.request.request_id
            running.window_tokens = 0
            self.cache.advance(name, chunk.end)
            if chunk.stops:
                self.cache.checkpoint(name, chunk.end)
            if not chunk.complete:
                continue
            if len(running.outputs) == 1:
                running.first_token_s = now
            if len(running.outputs) < running.request.max_new_tokens:
                short_of = self.cache.extend(name, running.outputs[-1:])
                assert short_of is None, "KV for the answer was reserved"
                continue
            self.cache.finish(name)
            del self._running[name]
            answers.append(running.answer(now))
        return answers
