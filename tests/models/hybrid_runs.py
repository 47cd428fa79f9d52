"""Tiny hybrid models, pools full of NaN, and the adapter from a model to the stack that the two-pass oracle runs on."""

from functools import cache

import torch
from torch import Tensor

import dasc.reference
from dasc.geometry import DtypePolicy
from dasc.models.hybrid import Batch, HybridConfig, HybridModel, KVPool, SequenceInput, StatePool, random_hybrid
from dasc.models.hybrid.attention import attend
from dasc.models.hybrid.batch import pack
from dasc.models.hybrid.model import Block
from dasc.models.hybrid.recurrent import Recurrent
from dasc.reference import AttentionLayer, RecurrentLayer, RecurrentState

VOCAB = 97
# (kind, gate): with the first, d_k != d_v and two value heads a key head
KINDS = (("gdn", "softplus"), ("kda", "softplus"), ("kda", "safe"))
# and a GDN whose beta reaches 2, with norms behind the attention
MODELS = (*KINDS, ("olmo", "softplus"))
F64 = DtypePolicy(temporal=torch.float64, conv=torch.float64)


def random_of(kind: str, gate: str, **options) -> tuple[HybridConfig, dict[str, Tensor]]:
    """``random_hybrid`` of a kind of :data:`MODELS`. OLMo-Hybrid has no experts."""
    if kind == "olmo":
        kind, options = "gdn", {**options, "family": "olmo_hybrid", "num_experts": 0}
    return random_hybrid(kind, gate, **options)


@cache
def tiny_model(
    kind: str = "gdn",
    gate: str = "softplus",
    *,
    attention_period: int = 2,
    num_experts: int = 4,
    dtype: torch.dtype = torch.float64,
) -> HybridModel:
    """Four blocks; a period of 2 ends on attention, one of 3 on a recurrent layer."""
    config, weights = random_of(
        kind,
        gate,
        seed=3,
        vocab_size=VOCAB,
        hidden_size=32,
        num_blocks=4,
        attention_period=attention_period,
        num_value_heads=2 if kind == "kda" else 4,
        num_key_heads=2,
        head_v_dim=8,
        head_k_dim=8 if kind == "kda" else 4,
        num_experts=num_experts,
        horizons_tokens=(2.0, 500.0),
    )
    return HybridModel(config, weights, dasc.reference, dtype=dtype)


def nan_pools(
    model: HybridModel, slots: int = 8, kv_slots: int = 400, dtypes: DtypePolicy = F64
) -> tuple[StatePool, KVPool]:
    """Pools whose memory was never written: whoever reads it shows it."""
    states, kv = model.new_states(slots, dtypes), model.new_kv(kv_slots)
    for pool in (states.temporal, states.conv, kv.rows):
        pool.fill_(float("nan"))
    return states, kv


def random_tokens(length: int, seed: int) -> Tensor:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


class Conversation:
    """A sequence of tokens with a slot of its own and KV slots scattered over the pool."""

    def __init__(self, number: int, tokens: Tensor, kv_slots: Tensor) -> None:
        self.slot = number + 1
        self.tokens = tokens
        self.kv_slots = kv_slots
        self.done = 0

    def next(self, count: int) -> SequenceInput:
        """The next ``count`` tokens, which then count as done."""
        start, end = self.done, self.done + count
        self.done = end
        return SequenceInput(self.tokens[start:end], start, self.slot, self.kv_slots[:end])


def conversations(lengths: list[int], kv_slots: int = 400, seed: int = 0) -> list[Conversation]:
    order = torch.randperm(kv_slots, generator=torch.Generator().manual_seed(seed))
    parts = order[: sum(lengths)].split(lengths)
    return [Conversation(n, random_tokens(len(part), seed + n), part) for n, part in enumerate(parts)]


def isolated(model: HybridModel, tokens: Tensor, dtypes: DtypePolicy = F64) -> tuple[Tensor, StatePool, KVPool]:
    """One sequence in one forward: logits ``[T, vocab]``, its state in slot 0, its K/V in slots ``0 .. T - 1``."""
    states, kv = nan_pools(model, 1, len(tokens), dtypes)
    batch = Batch((SequenceInput(tokens, 0, 0, torch.arange(len(tokens))),))
    return model.forward(batch, states, kv, all_tokens=True), states, kv


def assert_close(found: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    """Relative RMS; NaN anywhere fails."""
    assert found.shape == expected.shape
    error = (found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
    assert error <= tolerance, f"relative RMS error {error:.2e} above {tolerance:.0e}"


def reference_stack(model: HybridModel) -> list[RecurrentLayer | AttentionLayer]:
    """The model's blocks as ``dasc.reference.suffix_refresh`` takes them, each with its norms, MLP and residuals."""
    return [_recurrent(b, model) if isinstance(b.mixer, Recurrent) else _attention(b) for b in model.blocks]


def _recurrent(block: Block, model: HybridModel) -> RecurrentLayer:
    def run(x: Tensor, state: RecurrentState) -> tuple[Tensor, RecurrentState]:
        tokens = torch.zeros(len(x), dtype=torch.int64)
        packed = pack(Batch((SequenceInput(tokens, 1, 0, torch.arange(1 + len(x))),)), model.device)
        temporal, conv = state.temporal[None].clone(), state.conv[None].clone()
        mixed = block.mixer(block.mixer_input(x), packed, temporal, conv, None, model.ops)
        return block.feed(block.add_mixed(x, mixed)), RecurrentState(temporal[0], conv[0])

    return RecurrentLayer(run)


def _attention(block: Block) -> AttentionLayer:
    def project_kv(x: Tensor, position: int) -> Tensor:
        return block.mixer.project_kv(block.mixer_input(x), position + torch.arange(len(x)))

    def attend_last(x: Tensor, kv: Tensor) -> Tensor:
        t, s = len(x), len(kv)
        read = block.mixer_input(x)
        q = block.mixer.project_q(read, torch.arange(s - t, s))
        k, v = block.mixer.split_kv(kv)
        mask = torch.ones(t, s, dtype=torch.bool).tril(s - t)
        o = attend(q[None], k[None], v[None], mask[None, None], block.mixer.scale)[0]
        return block.feed(block.add_mixed(x, block.mixer.output(read, o)))

    return AttentionLayer(project_kv, attend_last)
