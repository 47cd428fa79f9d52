"""Checkpoints over tensor-parallel ranks: storage balancing (appendix B.1) by ``torch.distributed``."""

from dasc.fast.distributed.agreement import ExchangeError, RanksDisagreeError, agree_on, outcome_agreement
from dasc.fast.distributed.exchange import ExchangeCounters, StorageExchange
from dasc.fast.distributed.routes import PeerUnits, Routes, row_bytes

__all__ = [
    "ExchangeCounters",
    "ExchangeError",
    "PeerUnits",
    "RanksDisagreeError",
    "Routes",
    "StorageExchange",
    "agree_on",
    "outcome_agreement",
    "row_bytes",
]
