"""The fast path on the CPU: batched matrix products and gathers of plain PyTorch, no compiler, nothing but torch."""

from dasc.fast.cpu.conv import causal_conv1d
from dasc.fast.cpu.delta_rule import chunk_gdn, chunk_kda, recurrent_gdn, recurrent_kda
from dasc.fast.cpu.gates import beta_gate, safe_gate, softplus_gate
from dasc.fast.cpu.packing import pack, unpack
from dasc.fast.cpu.pooled import decode_gdn, decode_kda, prefill_gdn, prefill_kda
from dasc.fast.cpu.slots import pack_slots, unpack_slots

__all__ = [
    "beta_gate",
    "causal_conv1d",
    "chunk_gdn",
    "chunk_kda",
    "decode_gdn",
    "decode_kda",
    "pack",
    "pack_slots",
    "prefill_gdn",
    "prefill_kda",
    "recurrent_gdn",
    "recurrent_kda",
    "safe_gate",
    "softplus_gate",
    "unpack",
    "unpack_slots",
]
