"""The forward pass for training: the layers of :mod:`dasc.models.hybrid` over whole sequences, without pools.

The layers themselves, their projections, gates and norms are the serving model's own; only what they keep between
forwards is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad, silu, softplus

from dasc.models.hybrid.attention import Attention, attend
from dasc.models.hybrid.config import HybridConfig
from dasc.models.hybrid.model import read_layers
from dasc.models.hybrid.recurrent import GatedDeltaNet, KimiDeltaAttention, Operands, Recurrent
from dasc.models.hybrid.weights import WeightReader, rms_norm
from dasc.models.train.delta_rule import BLOCK, delta_rule


@dataclass(frozen=True, eq=False)
class OtherStates:
    """Recurrent states that sequences go on with in place of their own. The short convolution reads what stood before.

    Attributes:
        at: ``[B]`` int64, position before which a sequence's states are replaced; -1 for never.
        donor: ``[B]`` int64, the sequence whose states before that position it gets; -1 for zeros.
    """

    at: Tensor
    donor: Tensor


def hidden_states(
    config: HybridConfig, weights: Mapping[str, Tensor], tokens: Tensor, others: OtherStates | None = None
) -> tuple[Tensor, Tensor]:
    """What the output projection reads, and that projection; differentiable with respect to ``weights``.

    Args:
        config: of a model without experts.
        weights: by name, FP32 or FP64.
        tokens: ``[B, T]`` int64, sequences of equal length from position 0.
        others: states to go on with; every sequence keeps its own when ``None``.

    Returns:
        ``[B, T, hidden]`` after the final norm, and ``[vocab, hidden]``.
    """
    B, T = tokens.shape
    tokens = pad(tokens, (0, -T % BLOCK))
    dtype = next(iter(weights.values())).dtype
    reader = WeightReader(weights, dtype, tokens.device)
    blocks, embedding, final_norm, head = read_layers(config, reader)
    shape = tokens.shape
    positions = torch.arange(shape[1]).repeat(B)
    mask = torch.ones(shape[1], shape[1], dtype=torch.bool).tril()
    x = embedding[tokens.flatten()]
    for block in blocks:
        read = block.mixer_input(x)
        if isinstance(block.mixer, Attention):
            mixed = _attend(block.mixer, read, shape, positions, mask)
        else:
            mixed = _recur(block.mixer, read, shape, others)
        x = block.feed(block.add_mixed(x, mixed))
    return rms_norm(x, final_norm, config.norm_eps).view(*shape, -1)[:, :T], head


def logits(
    config: HybridConfig, weights: Mapping[str, Tensor], tokens: Tensor, others: OtherStates | None = None
) -> Tensor:
    """Logits ``[B, T, vocab]``; arguments as :func:`hidden_states`."""
    hidden, head = hidden_states(config, weights, tokens, others)
    return hidden @ head.T


def _attend(layer: Attention, x: Tensor, shape: torch.Size, positions: Tensor, mask: Tensor) -> Tensor:
    q = layer.project_q(x, positions)
    q = q.view(*shape, *q.shape[1:])
    k, v = layer.split_kv(layer.project_kv(x, positions).view(*shape, -1))
    return layer.output(x, attend(q, k, v, mask, layer.scale).flatten(0, 1))


def _recur(layer: Recurrent, x: Tensor, shape: torch.Size, others: OtherStates | None) -> Tensor:
    projected = layer.project(x)
    channels, width = layer.conv_weight.shape
    qkv = pad(projected.qkv.view(*shape, channels).mT, (width - 1, 0))
    qkv = silu(conv1d(qkv, layer.conv_weight.unsqueeze(1), groups=channels)).mT
    g, beta = _log_decay(layer, projected.decay), projected.beta.sigmoid()
    if layer.allow_neg_eigval:
        beta = 2 * beta
    operands = Operands.of(qkv.flatten(0, 1), g[None], beta[None], layer.geometry)
    inputs = [t.reshape(*shape, *t.shape[2:]) for t in operands]
    o = delta_rule(*inputs) if others is None else _recur_with(others, *inputs)
    return layer.output(o.flatten(0, 1), projected.gate)


def _recur_with(others: OtherStates, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The recurrence with states replaced on the way: such sequences are run a second time, the donor's tokens first.

    Without a donor the tokens before write nothing.
    """
    rows = (others.at >= 0).nonzero().flatten()
    donor = others.donor[rows]
    before = torch.arange(q.shape[1]) < others.at[rows, None]

    def again(x: Tensor) -> Tensor:
        return torch.where(_expand(before, x), x[donor], x[rows])

    writes = again(beta).masked_fill(_expand(before & (donor < 0)[:, None], beta), 0.0)
    inputs = (q, q[rows]), (k, again(k)), (v, again(v)), (g, again(g)), (beta, writes)
    own, second = torch.split(delta_rule(*map(torch.cat, inputs)), [len(q), len(rows)])
    return own.index_copy(0, rows, torch.where(_expand(before, second), own[rows], second))


def _expand(mask: Tensor, like: Tensor) -> Tensor:
    """``[B, T]`` with axes of one for the others of ``like``."""
    return mask.view(*mask.shape, *[1] * (like.ndim - 2))


def _log_decay(layer: Recurrent, a: Tensor) -> Tensor:
    """Eq. 2, without the care for extremes that serving takes."""
    assert isinstance(layer, GatedDeltaNet | KimiDeltaAttention)
    rate = layer.A_log.exp()
    if isinstance(layer, KimiDeltaAttention):
        rate = rate.unsqueeze(-1)
        if layer.lower_bound is not None:
            return layer.lower_bound * (rate * (a + layer.dt_bias)).sigmoid()
    return -rate * softplus(a + layer.dt_bias)
