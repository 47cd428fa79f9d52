"""The integrity check finds what is wrong: each contradiction planted, each named."""

import pytest

from dasc.cache import CacheConfig, IntegrityError, Tier, check
from tests.cache.fakes import Host


@pytest.fixture
def host() -> Host:
    """A compressed state, a dense one, one being packed, and a running request that refers to the compressed one."""
    host = Host(CacheConfig(native_slots=6, compressed_slots=2, kv_pages=40, policies=()))
    host.run("a", [1, 2])
    host.cache.step()
    host.run("b", [1, 2, 3, 4])
    host.run("c", [5, 6])
    host.start("r", [1, 2, 9])
    host.start("s", [1, 2, 9])
    check(host.cache)
    assert sorted(e.tier.value for e in host.stored().values()) == ["compressed", "demoting", "dense"]
    return host


def entry(host, prefix):
    return host.stored()[prefix]


def node(host, prefix):
    return entry(host, prefix).owner


def ledger(host):
    return host.cache.ledger


def rekey(host):
    children = ledger(host).tree.root.children
    children[b"\0\0\0\0"] = children.pop(next(iter(children)))


PLANTS = {
    "not all slots once": lambda h: ledger(h).native._free.append(h.cache.leases["r"].slot),
    "native: slot . belongs to 'thief'": lambda h: ledger(h).native.transfer(
        h.cache.leases["r"].slot, h.cache.leases["r"], "thief"
    ),
    "has two users": lambda h: setattr(h.cache.leases["s"], "slot", h.cache.leases["r"].slot),
    "compressed: slot . belongs to 'thief'": lambda h: ledger(h).compressed.transfer(
        entry(h, (1, 2)).slot, entry(h, (1, 2)), "thief"
    ),
    "not under its own key": rekey,
    "wrong end": lambda h: setattr(node(h, (5, 6)), "end", 3),
    "part of a page|wrong pages|wrong end": lambda h: setattr(node(h, (5, 6)), "key", b"\5\0\0\0"),
    "does not know its parent": lambda h: setattr(node(h, (1, 2, 3, 4)), "parent", node(h, (5, 6))),
    "can never be hit": lambda h: setattr(node(h, (5, 6)), "state", None),
    "younger than its parent": lambda h: setattr(node(h, (1, 2, 3, 4)), "stamp", 10**9),
    "missing from its order": lambda h: ledger(h).tree.leaves.discard(node(h, (5, 6))),
    "nodes and has": lambda h: setattr(ledger(h).tree, "nodes", 9),
    "pages and has": lambda h: setattr(ledger(h).tree, "pages", 9),
    "protected, has": lambda h: setattr(ledger(h).tree, "protected_pages", 9),
    "holds differ": lambda h: setattr(node(h, (1, 2)), "holds", 1),
    "held children, has": lambda h: setattr(ledger(h).tree.root, "held_children", 0),
    "does not know its node": lambda h: setattr(entry(h, (5, 6)), "owner", None),
    "tokens sits at": lambda h: setattr(entry(h, (5, 6)), "position", 3),
    "locks differ": lambda h: setattr(entry(h, (1, 2)), "locks", 1),
    "shares other than it holds": lambda h: setattr(h.cache.leases["r"], "shared_tokens", 1),
    "another prefix than its own": lambda h: h.cache.leases["r"].tokens.__setitem__(0, 7),
    "absent entry": lambda h: setattr(entry(h, (5, 6)), "tier", Tier.ABSENT),
    "dense counted": lambda h: setattr(ledger(h).store, "dense_count", 5),
    "compressed counted": lambda h: setattr(ledger(h).store, "compressed_count", 5),
    "demoting": lambda h: ledger(h).store.packs._under_way.clear(),
    "slots to come": lambda h: setattr(ledger(h).store.packs, "releasing", 5),
    "too many": lambda h: setattr(ledger(h).store, "dense_limit", 0),
    "one stamp": lambda h: setattr(entry(h, (5, 6)), "stamp", entry(h, (1, 2)).stamp),
    "5 is missing|is missing from its order": lambda h: [
        ledger(h).store.queues[Tier.DENSE].discard(e) for e in h.stored().values() if e.tier is Tier.DENSE
    ],
    "wrong page table": lambda h: h.cache.leases["r"].pages.__setitem__(0, h.cache.leases["r"].pages[0] ^ 1),
    "lacks pages": lambda h: h.cache.leases["r"].tokens.extend(b"\1\0\0\0" * 9),
    "KV page has two users": lambda h: setattr(h.cache.leases["s"], "pages", bytearray(h.cache.leases["r"].pages)),
    "KV pages held differ": lambda h: ledger(h).kv.alloc(1),
}


@pytest.mark.parametrize("says", PLANTS)
def test_a_planted_contradiction_is_found(host, says):
    PLANTS[says](host)
    with pytest.raises(IntegrityError, match=says):
        check(host.cache)


def test_checking_changes_nothing(host):
    digest, stats = host.cache.history_digest(), host.cache.stats()
    check(host.cache)
    assert (host.cache.history_digest(), host.cache.stats()) == (digest, stats)
