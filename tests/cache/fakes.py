"""Stand-ins for tensors: slots that hold what a state would know, poisoned while free, and movers that run late."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dasc.cache import CacheConfig, Lease, PrefixCache, StateEntry, Tier

POISON = "never written"
PARTS = ("temporal", "convolution", "side")
ZERO = dict.fromkeys(PARTS, (0, ()))


class Interrupted(BaseException):
    """A cancellation: no ``Exception``, so the cache must not swallow it."""


def state_of(tokens: Sequence[int]) -> dict[str, object]:
    """What a state that has seen exactly ``tokens`` holds, in every part."""
    return dict.fromkeys(PARTS, (len(tokens), tuple(tokens)))


class FakeStorage:
    """Native and compressed slots as dictionaries of parts. ``fail`` names operations that break half-way."""

    def __init__(self, native: int, compressed: int) -> None:
        self.native: dict[int, object] = dict.fromkeys(range(native + 1), POISON)
        self.compressed: dict[int, object] = dict.fromkeys(range(compressed + 1), POISON)
        self.fail: set[str] = set()
        self.before: Callable[[str], None] = lambda operation: None

    def _write(self, operation: str, table: dict[int, object], slot: int, value: object) -> None:
        assert slot > 0, "slot 0 is never used"
        if operation in self.fail:
            table[slot] = {"temporal": value["temporal"] if isinstance(value, dict) else value, "convolution": POISON}
            raise RuntimeError(f"{operation} broke half-way")
        table[slot] = dict(value) if isinstance(value, dict) else value

    def pack(self, native_slot: int, compressed_slot: int) -> None:
        self.before("pack")
        self._write("pack", self.compressed, compressed_slot, self.native[native_slot])

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.before("copy")
        for source, destination in pairs:
            self._write("copy", self.native, destination, self.native[source])

    def load(self, compressed_slot: int, active_slot: int, position: int) -> None:
        self.before("load")
        value = self.compressed[compressed_slot]
        assert isinstance(value, dict)
        assert value["temporal"][0] == position, "a checkpoint is loaded as the position it was taken at"
        self._write("load", self.native, active_slot, value)

    def clear(self, slots: Sequence[int]) -> None:
        self.before("clear")
        for slot in slots:
            self._write("clear", self.native, slot, ZERO)


@dataclass
class LatePack:
    """A pack that runs when somebody asks, or when the test says so: only then is its source read."""

    mover: "LateMover"
    native_slot: int
    compressed_slot: int
    fails: bool
    ran: bool = False

    def run(self) -> None:
        if not self.ran:
            if not self.fails:
                self.mover.storage.pack(self.native_slot, self.compressed_slot)
            self.ran = True

    def result(self) -> None:
        self.mover.storage.before("wait")
        self.run()
        if self.fails:
            raise RuntimeError("the pack failed")


@dataclass
class LateMover:
    """Packs run late, in any order; whether one fails is settled when it starts."""

    storage: FakeStorage
    packs_fail: bool = False
    tickets: list[LatePack] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.copy = self.storage.copy
        self.load = self.storage.load
        self.clear = self.storage.clear

    def pack(self, native_slot: int, compressed_slot: int) -> LatePack:
        self.storage.before("submit")
        ticket = LatePack(self, native_slot, compressed_slot, self.packs_fail)
        self.tickets.append(ticket)
        return ticket

    def run_some(self, seed: int) -> None:
        """Let some of the packs under way finish now."""
        self.tickets = [ticket for ticket in self.tickets if not ticket.ran]
        for i, ticket in enumerate(self.tickets):
            if seed >> i & 1:
                ticket.run()


class Host:
    """A cache with storage and the least of an engine: it computes states, and looks at what it reads."""

    def __init__(self, config: CacheConfig, mover_type: Callable[[FakeStorage], object] = LateMover, **options) -> None:
        self.storage = FakeStorage(config.native_slots, config.compressed_limit)
        self.mover = mover_type(self.storage)
        self.cache = PrefixCache(config, self.mover, **options)

    def tokens(self, request) -> list[int]:
        lease = self.cache.leases[request]
        return memoryview(bytes(lease.tokens)).cast("i").tolist()

    def check_state(self, request) -> None:
        """The active slot holds the state of exactly the tokens the cache says it has seen."""
        lease = self.cache.leases[request]
        if lease.state_position >= 0:
            assert self.storage.native[lease.slot] == state_of(self.tokens(request)[: lease.state_position])

    def compute(self, request, position: int) -> None:
        """Run the model up to ``position``."""
        self.check_state(request)
        lease = self.cache.leases[request]
        self.storage.native[lease.slot] = state_of(self.tokens(request)[:position])
        self.cache.advance(request, position)

    def start(self, request, tokens, **options) -> Lease:
        """Admit and load; the request must be admitted."""
        lease = self.cache.acquire(request, tokens, **options)
        assert isinstance(lease, Lease)
        assert self.cache.issue_loads() == []
        self.check_state(request)
        return lease

    def run(self, request, tokens, output=(), **options):
        """A whole request: stops, checkpoints, output, finish. Returns ``(hit_tokens, what finish said)``."""
        lease = self.start(request, tokens, **options)
        if output:
            assert self.cache.extend(request, output) is None
        end = len(tokens) + len(output)
        while (stop := self.cache.next_stop(request)) is not None and stop <= end:
            self.compute(request, stop)
            self.cache.checkpoint(request, stop)
        self.compute(request, end)
        return lease.hit_tokens, self.cache.finish(request)

    def poison_free(self) -> None:
        """Nobody may read a free slot: make what it holds useless."""
        for slot in self.cache.ledger.native.free_list():
            self.storage.native[slot] = POISON
        for slot in self.cache.ledger.compressed.free_list():
            self.storage.compressed[slot] = POISON

    def stored(self) -> dict[tuple[int, ...], StateEntry]:
        """Prefix to entry, for every state in the cache."""
        return {
            tuple(memoryview(node.prefix()).cast("i").tolist()): node.state
            for node in self.cache.ledger.tree.walk()
            if node.state is not None
        }

    def check_data(self) -> None:
        """Every stored state holds the data of its own prefix where it is served from."""
        for prefix, entry in self.stored().items():
            table = self.storage.compressed if entry.tier is Tier.COMPRESSED else self.storage.native
            assert table[entry.slot] == state_of(prefix), (prefix, entry)
        for request in self.cache.leases:
            self.check_state(request)
