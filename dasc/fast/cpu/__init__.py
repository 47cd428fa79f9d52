"""The fast path on the CPU: batched matrix products and gathers of plain PyTorch, no compiler, nothing but torch."""

from dasc.fast.cpu.conv import causal_conv1d
from dasc.fast.cpu.delta_rule import chunk_gdn, chunk_kda, recurrent_gdn, recurrent_kda
from dasc.fast.cpu.gates import beta_gate, safe_gate, softplus_gate
from dasc.fast.cpu.packing import pack, unpack

__all__ = [
    "beta_gate",
    "causal_conv1d",
    "chunk_gdn",
    "chunk_kda",
    "pack",
    "recurrent_gdn",
    "recurrent_kda",
    "safe_gate",
    "softplus_gate",
    "unpack",
]
