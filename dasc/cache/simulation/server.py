"""The event loop of the simulated server."""

from __future__ import annotations

import collections
import heapq
from collections.abc import Callable
from dataclasses import dataclass

from dasc.cache.config import CacheConfig
from dasc.cache.entries import Tier
from dasc.cache.lease import Backpressure
from dasc.cache.prefix_cache import PrefixCache
from dasc.cache.records import RequestRecord, StepRecord
from dasc.cache.simulation.arrivals import Arrivals
from dasc.cache.simulation.cost_model import CostModel
from dasc.cache.simulation.load import Request
from dasc.cache.simulation.mover import SimulatedMover


@dataclass(eq=False, slots=True)
class _Running:
    """A request on the server. Positions are tokens.

    Attributes:
        number: its name in the cache.
        stop: where its next chunk ends at the latest: a checkpoint, or the end of the prompt.
        checkpoint: id at which the next checkpoint is due, if any.
        replay: tokens still to be replayed.
        first_token_s: when the prompt was done.
    """

    number: int
    request: Request
    arrival_s: float
    hit_tokens: int
    tier: str
    position: int
    stop: int
    checkpoint: int | None
    replay: int
    first_token_s: float = 0.0


class Server:
    """Serves what arrives, through the cache, in simulated time.

    Attributes:
        mover: holds the clock.
        cache: the cache.
        finished: one record a request, in order of completion; arrivals from ``origin_s`` on.
        origin_s: on the clock, where records count from.
        steps: one record a forward pass, if recorded.
        refresh_tokens: replayed so far.

    Args:
        config: of the cache; one "token" of it is one id.
        cost: constants.
        server_limit: most running requests.
        chunk_tokens: most prompt tokens of a forward pass.
        tokens_per_id: tokens an id stands for.
        mixed_passes: decode in prefill passes, too.
        two_pass_refresh: replay in a pass of its own.
        collective: storage is balanced over ranks.
        record: keep steps and transfers.
    """

    def __init__(
        self,
        config: CacheConfig,
        cost: CostModel,
        *,
        server_limit: int,
        chunk_tokens: int,
        tokens_per_id: int,
        mixed_passes: bool = False,
        two_pass_refresh: bool = False,
        collective: bool = False,
        record: bool = False,
    ) -> None:
        self.mover = SimulatedMover(config, cost, collective=collective, record=record)
        self.cache = PrefixCache(config, self.mover, clock=self.mover.clock)
        self.mover.counters = self.cache.counters
        self.finished: list[RequestRecord] = []
        self.origin_s = 0.0
        self.steps: list[StepRecord] = []
        self.refresh_tokens = 0
        self._cost = cost
        self._limit = server_limit
        self._chunk = chunk_tokens
        self._tokens_per_id = tokens_per_id
        self._stores_ends = tokens_per_id == 1
        self._mixed = mixed_passes
        self._two_pass = two_pass_refresh
        self._record = record
        self._waiting: collections.deque[tuple[float, int, Request]] = collections.deque()
        self._prefilling: list[_Running] = []
        # (last pass, number, request) of sequences that decode; passes are counted by _passes
        self._decoding: list[tuple[int, int, _Running]] = []
        self._passes = 0
        self._context_tokens = 0  # of all sequences that decode
        self._numbers = 0
        self._arrivals = Arrivals((), concurrency=1, start_s=0.0)

    def run(self, arrivals: Arrivals, progress: Callable[[int], None] = lambda done: None) -> None:
        """Serve until nothing is left to come.

        Args:
            progress: called with the number of finished requests now and then.
        """
        mover, queue, waiting = self.mover, arrivals.queue, self._waiting
        self._arrivals = arrivals
        reported = 0
        while True:
            while queue and queue[0][0] <= mover.now:
                waiting.append(heapq.heappop(queue))
            self.cache.step()
            if waiting and len(self._prefilling) + len(self._decoding) < self._limit:
                self._admit()
            if self._prefilling:
                self._prefill()
            elif self._decoding:
                self._decode()
            elif queue:
                mover.now = max(mover.now, queue[0][0])
            else:
                assert not waiting, "an idle server can admit any request"
                return
            if len(self.finished) - reported >= 256:
                reported = len(self.finished)
                progress(reported)

    # -- admission ------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Start waiting requests, first come, first served, and fill their slots."""
        cache, per_id = self.cache, self._tokens_per_id
        room = self._limit - len(self._prefilling) - len(self._decoding)
        while self._waiting and room:
            arrival_s, _, request = self._waiting[0]
            self._numbers += 1
            lease = cache.acquire(self._numbers, request.prompt, reserve_tokens=len(request.output))
            if isinstance(lease, Backpressure):
                break
            self._waiting.popleft()
            room -= 1
            hit = lease.hit_tokens * per_id
            tier = "miss" if lease.entry is None else "compressed" if lease.entry.tier is Tier.COMPRESSED else "dense"
            replay = cache.config.refresh_window(hit, request.prompt_tokens) if tier == "compressed" else 0
            running = _Running(self._numbers, request, arrival_s, hit, tier, hit, hit, None, replay)
            self._look_ahead(running)
            self._prefilling.append(running)
        failed = cache.issue_loads()
        assert not failed, "simulated transfers do not fail"

    def _look_ahead(self, running: _Running) -> None:
        """Find where the next chunk must end."""
        running.checkpoint = self.cache.next_stop(running.number)
        running.stop = running.request.prompt_tokens
        if running.checkpoint is not None:
            running.stop = min(running.checkpoint * self._tokens_per_id, running.stop)

    # -- forward passes -------------------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """One forward pass over a chunk of prompts, and over every sequence that decodes if passes are mixed."""
        room = self._chunk
        pairs = replayed = 0
        stopped = []
        for running in self._prefilling:
            start = running.position
            count = min(running.stop - start, room)
            running.position = start + count
            pairs += count * start + count * (count + 1) // 2
            room -= count
            if running.replay:
                tokens = self._replay(running)
                replayed += tokens
                pairs += tokens * (running.hit_tokens - tokens) + tokens * (tokens + 1) // 2
            if running.position == running.stop:
                stopped.append(running)
            if not room:
                break
        self._pass(self._chunk - room, pairs, replayed)
        for running in stopped:
            self._stop(running)
        self._prefilling = [x for x in self._prefilling if x.position < x.request.prompt_tokens]

    def _replay(self, running: _Running) -> int:
        """Refresh what a compressed hit left out; return the tokens that the request's own prefill replays."""
        tokens, running.replay = running.replay, 0
        self.refresh_tokens += tokens
        if not self._two_pass:
            return tokens
        self.mover.now += self._cost.two_pass_s + self._cost.two_pass_s_per_token * tokens
        return 0

    def _pass(self, prefill_tokens: int, pairs: int, replayed: int) -> None:
        sequences, context = (len(self._decoding), self._context_tokens) if self._mixed else (0, 0)
        seconds = self._cost.forward_s(prefill_tokens + replayed, pairs, sequences, context)
        self.mover.now += seconds
        if self._record:
            self.steps.append(StepRecord(prefill_tokens, pairs, replayed, sequences, context, seconds))
        if sequences:
            self._after_passes(1)

    def _stop(self, running: _Running) -> None:
        """A chunk ended at a checkpoint or at the end of the prompt, which gives the first token of the answer."""
        request, position = running.request, running.checkpoint
        if position is not None and running.position == position * self._tokens_per_id:
            self.cache.advance(running.number, position)
            self.cache.checkpoint(running.number, position)
            self._look_ahead(running)
        if running.position < request.prompt_tokens:
            return
        running.first_token_s = self.mover.now
        if request.output_tokens == 1:
            self._finish(running)
            return
        heapq.heappush(self._decoding, (self._passes + request.output_tokens - 1, running.number, running))
        self._context_tokens += request.prompt_tokens + 1

    def _decode(self) -> None:
        """Passes that only decode, up to the next event: a completion, a commit or an arrival that can be admitted."""
        sequences, context = len(self._decoding), self._context_tokens
        passes = self._decoding[0][0] - self._passes
        if self.cache.ledger.store.packs.releasing:
            passes = 1  # the next step waits for the packs under way
        queue = self._arrivals.queue
        if queue and sequences < self._limit:
            wait_s = queue[0][0] - self.mover.now
            passes = min(passes, self._cost.decode_steps_until(wait_s, sequences, context))
        if self._record:
            for i in range(passes):
                read = context + i * sequences
                self.steps.append(StepRecord(0, 0, 0, sequences, read, self._cost.forward_s(0, 0, sequences, read)))
        self.mover.now += self._cost.decode_s(passes, sequences, context)
        self._after_passes(passes)

    def _after_passes(self, passes: int) -> None:
        decoding = self._decoding
        self._passes += passes
        self._context_tokens += passes * len(decoding)
        while decoding and decoding[0][0] == self._passes:
            running = heapq.heappop(decoding)[2]
            self._context_tokens -= running.request.prompt_tokens + running.request.output_tokens
            self._finish(running)

    def _finish(self, running: _Running) -> None:
        cache, request, number = self.cache, running.request, running.number
        if self._stores_ends:
            short_of = cache.extend(number, request.output)
            assert short_of is None, "KV for the answer was reserved"
            # the last token of an answer is never fed back to the model
            cache.advance(number, len(request.prompt) + len(request.output) - 1)
            cache.finish(number)
        else:  # the end lies inside a block: only the checkpoints taken on the way are of use
            cache.abort(number)
        now = self.mover.now
        self.finished.append(
            RequestRecord(
                str(number),
                running.arrival_s - self.origin_s,
                running.first_token_s - running.arrival_s,
                now - running.arrival_s,
                request.prompt_tokens,
                running.hit_tokens,
                running.tier,
                request.output_tokens,
            )
        )
        self._arrivals.answered(request, now)
