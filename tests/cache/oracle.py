"""The cache told plainly: dictionaries of prefixes and rules read off appendix B.2, every search a linear scan.

Shares no code with dasc.cache. Prefixes are tuples of token ids; a page is a prefix of whole pages; slots are counted,
not numbered.
"""

from dataclasses import dataclass, field

Prefix = tuple[int, ...]


@dataclass
class Entry:
    stamp: int
    tier: str  # dense, demoting, compressed
    locks: int = 0
    pack_fails: bool = False


@dataclass
class Running:
    tokens: Prefix
    store: bool
    held: Prefix = ()  # the prefix whose pages it shares
    locked: Prefix | None = None
    pages: int = 0  # shared and own
    hit: int = 0
    state: int = -1  # tokens the state has seen; -1 before loading


@dataclass
class Oracle:
    native: int
    compressed: int
    kv_pages: int
    page: int
    dense_limit: int | None
    watermark: int
    packs_fail: bool = False
    fail: set[str] = field(default_factory=set)
    entries: dict[Prefix, Entry] = field(default_factory=dict)
    running: dict[int, Running] = field(default_factory=dict)
    packing: list[Prefix] = field(default_factory=list)
    pages: dict[Prefix, int] = field(default_factory=dict)  # page-aligned prefix -> last use
    now: int = 0

    # counts

    def tier(self, name: str) -> list[Prefix]:
        return [p for p, e in self.entries.items() if e.tier == name]

    def free_native(self, slots_in_hand: int = 0) -> int:
        return self.native - len(self.running) - slots_in_hand - len(self.tier("dense")) - len(self.packing)

    def free_compressed(self) -> int:
        return self.compressed - len(self.tier("compressed")) - len(self.packing)

    def own_pages(self) -> int:
        return sum(r.pages - len(r.held) // self.page for r in self.running.values())

    def free_pages(self) -> int:
        return self.kv_pages - len(self.pages) - self.own_pages()

    def protected(self, extra: Prefix = ()) -> set[Prefix]:
        held = [r.held for r in self.running.values()] + [extra]
        return {h[:end] for h in held for end in range(self.page, len(h) + 1, self.page)}

    # tree

    def match(self, tokens: Prefix) -> tuple[int, int]:
        """KV tokens and usable tokens."""
        kv = 0
        while kv + self.page <= max(len(tokens) - 1, 0) and tokens[: kv + self.page] in self.pages:
            kv += self.page
        usable = max((len(p) for p in self.entries if len(p) <= kv and tokens[: len(p)] == p), default=0)
        return kv, usable

    def touch_pages(self, prefix: Prefix) -> None:
        self.now += 1
        for end in range(self.page, len(prefix) + 1, self.page):
            self.pages[prefix[:end]] = self.now

    def has_child(self, prefix: Prefix) -> bool:
        return any(len(p) > len(prefix) and p[: len(prefix)] == prefix for p in self.pages)

    def prune(self, prefix: Prefix, held: Prefix = ()) -> None:
        while (
            prefix and not self.has_child(prefix) and prefix not in self.entries and prefix not in self.protected(held)
        ):
            del self.pages[prefix]
            prefix = prefix[: -self.page]

    # tiers

    def use(self, prefix: Prefix) -> None:
        self.now += 1
        self.entries[prefix].stamp = self.now

    def oldest(self, *tiers: str) -> Prefix | None:
        eligible = [p for p, e in self.entries.items() if e.tier in tiers and not e.locks]
        return min(eligible, key=lambda p: self.entries[p].stamp, default=None)

    def dense_room(self) -> bool:
        return self.dense_limit is None or len(self.tier("dense")) < self.dense_limit

    def evict(self, prefix: Prefix, held: Prefix = ()) -> None:
        if self.entries[prefix].tier == "demoting":
            self.commit(prefix, held)
        if prefix in self.entries:
            del self.entries[prefix]
            self.prune(prefix, held)

    def start_pack(self, prefix: Prefix) -> None:
        self.entries[prefix].tier = "demoting"
        self.entries[prefix].pack_fails = self.packs_fail
        self.packing.append(prefix)

    def commit(self, prefix: Prefix, held: Prefix = ()) -> bool:
        entry = self.entries[prefix]
        self.packing.remove(prefix)
        if not entry.pack_fails:
            entry.tier = "compressed"
            return True
        room = self.dense_room()
        entry.tier = "dense"
        if not room:
            self.evict(prefix, held)
        return False

    def unlocked_packs(self) -> list[Prefix]:
        return [p for p in self.packing if not self.entries[p].locks]

    def reclaim_one(self, may_demote: bool, held: Prefix = ()) -> bool:
        dense = self.oldest("dense")
        if dense is None:
            return False
        if may_demote and self.free_compressed() == 0:
            oldest = self.oldest("dense", "compressed")
            if self.entries[oldest].tier == "compressed":
                self.evict(oldest, held)
        if may_demote and self.free_compressed():
            self.start_pack(dense)
        else:
            self.evict(dense, held)
        return True

    def take_slot(self, held: Prefix = ()) -> bool:
        may_demote = True
        while self.free_native() == 0:
            if not self.unlocked_packs() and not self.reclaim_one(may_demote, held):
                return False
            if self.free_native() == 0:
                may_demote = self.commit(self.unlocked_packs()[0], held)
        return True

    def step(self) -> None:
        for prefix in self.unlocked_packs():
            self.commit(prefix)
        while self.free_native() + len(self.unlocked_packs()) < self.watermark and self.reclaim_one(True):
            pass

    # requests

    def acquire(self, request: int, tokens: Prefix, lookup: bool, store: bool, reserve: int) -> str | None:
        pages = -(-(len(tokens) + reserve) // self.page)
        usable = self.match(tokens)[1] if lookup else 0
        short_of = self.admit(request, tokens, usable, pages, store)
        if short_of == "native" and usable and self.take_slot():
            # the slot is taken before the prompt is matched again: count it while pages are looked for
            short_of = self.admit(request, tokens, self.match(tokens)[1], pages, store, slot_in_hand=True)
        if short_of is None and self.running[request].hit:
            self.use(tokens[: self.running[request].hit])
            self.touch_pages(tokens[: self.running[request].hit])
        return short_of

    def admit(
        self, request: int, tokens: Prefix, usable: int, pages: int, store: bool, slot_in_hand: bool = False
    ) -> str | None:
        held = tokens[:usable]
        if usable:
            self.entries[held].locks += 1
        own = pages - usable // self.page
        short_of = None
        if own > self.free_pages() + len(self.pages) - len(self.protected(held) & set(self.pages)):
            short_of = "kv"
        elif not slot_in_hand and not self.take_slot(held):
            short_of = "native"
        if short_of is not None:
            if usable:
                self.entries[held].locks -= 1
            self.prune(held)
            return short_of
        self.take_pages(own, held)
        locked = held if usable else None
        self.running[request] = Running(tokens, store, held=held, locked=locked, pages=pages, hit=usable)
        return None

    def take_pages(self, pages: int, held: Prefix = ()) -> None:
        while self.free_pages() < pages:
            leaves = [p for p in self.entries if not self.has_child(p) and p not in self.protected(held)]
            self.evict(min(leaves, key=lambda p: self.pages[p]), held)

    def load(self) -> list[int]:
        waiting = {i: r for i, r in self.running.items() if r.state < 0}
        copies = [i for i, r in waiting.items() if r.hit and self.entries[r.locked].tier != "compressed"]
        loads = [i for i, r in waiting.items() if r.hit and self.entries[r.locked].tier == "compressed"]
        fresh = [i for i, r in waiting.items() if not r.hit]
        failed = []
        for operation, group in (("copy", copies), ("load", loads), ("clear", fresh)):
            if operation in self.fail:
                failed += group
            else:
                for i in group:
                    self.running[i].state = self.running[i].hit
        for i in failed:
            self.end(i)
        return failed

    def extend(self, request: int, tokens: Prefix) -> bool:
        run = self.running[request]
        pages = -(-(len(run.tokens) + len(tokens)) // self.page) - run.pages
        if pages > 0:
            if pages > self.free_pages() + len(self.pages) - len(self.protected() & set(self.pages)):
                return False
            self.take_pages(pages)
            run.pages += pages
        run.tokens += tokens
        return True

    def release_state(self, request: int) -> None:
        run = self.running[request]
        if run.locked is not None:
            self.entries[run.locked].locks -= 1
            run.locked = None

    def refer(self, request: int, prefix: Prefix) -> None:
        run = self.running[request]
        old, run.held = run.held, prefix
        self.entries[prefix].locks += 1
        self.release_state(request)
        run.locked = prefix
        self.prune(old)

    def end(self, request: int) -> None:
        self.release_state(request)
        held = self.running.pop(request).held
        self.prune(held)

    def store(self, request: int, finished: bool) -> str:
        """A checkpoint, or the one at the end; says what came of it."""
        run = self.running[request]
        prefix = run.tokens[: max(run.state, 0)]
        if not prefix:
            return "no_state"
        if not run.store:
            return "opted_out"
        if len(prefix) % self.page:
            return "unaligned"
        if prefix in self.entries:
            self.use(prefix)
            self.touch_pages(prefix)
            self.refer(request, prefix)
            return "stored"
        if self.free_compressed() == 0:
            spare = self.dense_room() and (finished or self.free_native() > self.watermark)
            if not spare:
                victim = self.oldest("dense", "compressed")
                if victim is None:
                    return "no_room"
                self.evict(victim)
        tier = "dense" if finished or self.free_compressed() == 0 else "compressed"
        self.now += 1
        if not finished and (self.packs_fail if tier == "compressed" else "copy" in self.fail):
            return "transfer_failed"
        self.entries[prefix] = Entry(self.now, tier)
        self.touch_pages(prefix)
        self.refer(request, prefix)
        return "new"

    def finish(self, request: int) -> str:
        run = self.running[request]
        answer = self.store(request, finished=True)
        self.end(request)
        if answer == "new":
            prefix = run.tokens[: run.state]
            if self.free_compressed():
                self.start_pack(prefix)
        return answer

    def flush(self) -> None:
        for prefix in list(self.entries):
            if prefix in self.entries and not self.entries[prefix].locks:
                self.evict(prefix)
