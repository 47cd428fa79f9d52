"""The simulated server told plainly: one pass at a time, one sequence at a time, lists instead of heaps.

It drives a cache of its own. Meant to be read beside the documentation of dasc.cache.simulation.simulator.
"""

from dataclasses import dataclass

from dasc.cache import Backpressure, CacheConfig, PrefixCache, Tier
from dasc.cache.records import RequestRecord
from dasc.cache.simulation import CostModel, Load, Request, Serving


class NaivePack:
    def __init__(self, server, end_s):
        self.server, self.end_s = server, end_s

    def result(self):
        self.server.now = max(self.server.now, self.end_s)


@dataclass
class Going:
    name: int
    request: Request
    arrival_s: float
    hit: int
    tier: str
    done: int
    replay: int
    first_token_s: float = 0.0
    answered: int = 0


class NaiveServer:
    """Also the cache's mover."""

    def __init__(self, config: CacheConfig, cost: CostModel, serving: Serving, load: Load) -> None:
        self.now = self.stream_free_s = 0.0
        self.config, self.cost, self.serving, self.load_served = config, cost, serving, load
        self.cache = PrefixCache(config, self)
        self.going: list[Going] = []
        self.records: list[RequestRecord] = []
        self.names = self.demotions = 0

    # -- mover ----------------------------------------------------------------------------------------------------

    def pack(self, native_slot, compressed_slot):
        seen, self.demotions = self.demotions, self.cache.counters.demotions
        name = "demote" if self.demotions > seen else "store"
        took = getattr(self.cost, f"{name}_latency_s") + getattr(self.cost, f"{name}_s_per_byte") * (
            self.config.compressed_slot_bytes
        )
        took += self.cost.collective_latency_s if self.serving.collective else 0
        self.stream_free_s = max(self.now, self.stream_free_s) + took
        return NaivePack(self, self.stream_free_s)

    def copy(self, pairs):
        self.now += self.cost.copy_latency_s + self.cost.copy_s_per_byte * self.config.native_slot_bytes * len(pairs)

    def load(self, compressed_slot, active_slot, position):
        self.now += self.cost.load_latency_s + self.cost.load_s_per_byte * self.config.compressed_slot_bytes
        self.now += self.cost.collective_latency_s if self.serving.collective else 0

    def clear(self, slots):
        pass

    # -- requests -------------------------------------------------------------------------------------------------

    def serve(self, requests, concurrency) -> None:
        """To the end. ``concurrency`` ``None``: at their own times."""
        self.origin = self.now
        self.closed = concurrency is not None
        self.turns: dict[int, list[Request]] = {}
        for request in requests:
            self.turns.setdefault(request.conversation, []).append(request)
        self.not_begun = list(self.turns)
        self.coming: list[tuple[float, Request]] = []
        if self.closed:
            for _ in range(min(concurrency, len(self.not_begun))):
                self.begin()
        else:
            self.coming = [(self.origin + r.arrival_s * self.serving.time_scale, r) for r in requests]
        waiting: list[tuple[float, Request]] = []
        while self.coming or waiting or self.going:
            self.coming.sort(key=lambda c: c[0])
            while self.coming and self.coming[0][0] <= self.now:
                waiting.append(self.coming.pop(0))
            self.cache.step()
            self.admit(waiting)
            if self.going:
                self.one_pass()
            else:
                self.now = max(self.now, min((time_s for time_s, _ in self.coming), default=self.now))
        self.cache.step()  # waits for the last pack

    def begin(self) -> None:
        if self.not_begun:
            self.coming.append((self.now, self.turns[self.not_begun.pop(0)].pop(0)))

    def admit(self, waiting) -> None:
        while waiting and len(self.going) < self.serving.server_limit:
            arrival_s, request = waiting[0]
            self.names += 1
            lease = self.cache.acquire(self.names, request.prompt, reserve_tokens=len(request.output))
            if isinstance(lease, Backpressure):
                break
            waiting.pop(0)
            hit = lease.hit_tokens * self.load_served.tokens_per_id
            entry = lease.entry
            tier = "miss" if entry is None else "compressed" if entry.tier is Tier.COMPRESSED else "dense"
            replay = min(hit, self.config.refresh_window_tokens) if tier == "compressed" else 0
            self.going.append(Going(self.names, request, arrival_s, hit, tier, hit, replay))
        self.cache.issue_loads()

    def one_pass(self) -> None:
        per_id = self.load_served.tokens_per_id
        prefilling = [g for g in self.going if g.done < g.request.prompt_tokens]
        decoding = [g for g in self.going if g.done == g.request.prompt_tokens]
        if prefilling and not self.serving.mixed_passes:
            decoding = []
        room = self.serving.chunk_tokens
        tokens = pairs = replayed = 0
        stopped = []
        for g in prefilling:
            if room == 0:
                break
            checkpoint = self.cache.next_stop(g.name)
            stop = g.request.prompt_tokens
            if checkpoint is not None:
                stop = min(stop, checkpoint * per_id)
            for _ in range(min(stop - g.done, room)):
                g.done += 1
                pairs += g.done
                tokens += 1
                room -= 1
            if self.serving.two_pass_refresh and g.replay:
                self.now += self.cost.two_pass_s + self.cost.two_pass_s_per_token * g.replay
            else:
                replayed += g.replay
                pairs += sum(range(g.hit - g.replay + 1, g.hit + 1))
            g.replay = 0
            if g.done == stop:
                stopped.append((g, checkpoint))
        context = sum(g.request.prompt_tokens + g.answered for g in decoding)
        self.now += self.cost.forward_s(tokens + replayed, pairs, len(decoding), context)
        for g in sorted(decoding, key=lambda g: g.name):
            g.answered += 1
            self.end_if_answered(g)
        for g, checkpoint in stopped:
            if checkpoint is not None and g.done == checkpoint * per_id:
                self.cache.advance(g.name, checkpoint)
                self.cache.checkpoint(g.name, checkpoint)
            if g.done == g.request.prompt_tokens:
                g.first_token_s = self.now
                g.answered = 1
                self.end_if_answered(g)

    def end_if_answered(self, g: Going) -> None:
        request = g.request
        if g.answered < request.output_tokens:
            return
        self.going.remove(g)
        if self.load_served.tokens_per_id == 1:
            self.cache.extend(g.name, request.output)
            self.cache.advance(g.name, request.prompt_tokens + request.output_tokens - 1)
            self.cache.finish(g.name)
        else:
            self.cache.abort(g.name)
        times = (g.arrival_s - self.origin, g.first_token_s - g.arrival_s, self.now - g.arrival_s)
        self.records.append(
            RequestRecord(str(g.name), *times, request.prompt_tokens, g.hit, g.tier, request.output_tokens)
        )
        if self.closed and self.turns[request.conversation]:
            self.coming.append((self.now, self.turns[request.conversation].pop(0)))
        elif self.closed:
            self.begin()
