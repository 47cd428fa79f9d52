"""Host logic of the two-tier cache of state checkpoints. Knows slots, tokens and pages, never a tensor."""

from dasc.cache.checkpoints import AfterPrompt, AtJunctions, AtPromptEnd, CheckpointPolicy, EveryTokens, PromptInfo
from dasc.cache.config import CacheConfig
from dasc.cache.counters import Counters, History
from dasc.cache.entries import NotCached, StateEntry, Tier
from dasc.cache.explain import Explanation
from dasc.cache.integrity import IntegrityError, check
from dasc.cache.lease import Backpressure, Lease, Match
from dasc.cache.pools import PagePool, SlotAllocator, SlotPool
from dasc.cache.prefix_cache import PrefixCache
from dasc.cache.radix import RadixTree, encode_tokens
from dasc.cache.tiers import TwoTierStore
from dasc.cache.transfers import InlineMover, Mover, StateStorage, ThreadMover, Ticket, TransferError

__all__ = [
    "AfterPrompt",
    "AtJunctions",
    "AtPromptEnd",
    "Backpressure",
    "CacheConfig",
    "CheckpointPolicy",
    "Counters",
    "EveryTokens",
    "Explanation",
    "History",
    "InlineMover",
    "IntegrityError",
    "Lease",
    "Match",
    "Mover",
    "NotCached",
    "PagePool",
    "PrefixCache",
    "PromptInfo",
    "RadixTree",
    "SlotAllocator",
    "SlotPool",
    "StateEntry",
    "StateStorage",
    "ThreadMover",
    "Ticket",
    "Tier",
    "TransferError",
    "TwoTierStore",
    "check",
    "encode_tokens",
]
