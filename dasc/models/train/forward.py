"""The forward pass for training: the layers of :mod:`dasc.models.hybrid` over whole sequences, without pools.

The layers themselves, their projections, gates and norms are the serving model's own; only what they keep between
forwards is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import conv1d, pad, silu, softplus

from dasc.models.hybrid.attention import Attention, attend
from dasc.models.hybrid.config import HybridConfig
from dasc.models.hybrid.model import read_layers
from dasc.models.hybrid.recurrent import GatedDeltaNet, KimiDeltaAttention, Operands, Recurrent
from dasc.models.hybrid.weights import WeightReader, rms_norm
from dasc.models.train.delta_rule import BLOCK, delta_rule


def hidden_states(
    config: HybridConfig, weights: Mapping[str, Tensor], tokens: Tensor, forget_at: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What the output projection reads, and that projection; differentiable with respect to ``weights``.

    Args:
        config: of a model without experts.
        weights: by name, FP32 or FP64.
        tokens: ``[B, T]`` int64, sequences of equal length from position 0.
        forget_at: ``[B]`` int64, position before which each sequence's recurrent states are zeroed; -1 for none. The
            short convolution still reads what stood before.

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
    forget = None if forget_at is None else (torch.arange(shape[1]) == forget_at[:, None]).flatten()
    x = embedding[tokens.flatten()]
    for block in blocks:
        normed = rms_norm(x, block.mixer_norm, block.eps)
        if isinstance(block.mixer, Attention):
            x = x + _attend(block.mixer, normed, shape, positions, mask)
        else:
            x = x + _recur(block.mixer, normed, shape, forget)
        x = block.feed(x)
    return rms_norm(x, final_norm, config.norm_eps).view(*shape, -1)[:, :T], head


def logits(
    config: HybridConfig, weights: Mapping[str, Tensor], tokens: Tensor, forget_at: Tensor | None = None
) -> Tensor:
    """Logits ``[B, T, vocab]``; arguments as :func:`hidden_states`."""
    hidden, head = hidden_states(config, weights, tokens, forget_at)
    return hidden @ head.T


def _attend(layer: Attention, x: Tensor, shape: torch.Size, positions: Tensor, mask: Tensor) -> Tensor:
    q = layer.project_q(x, positions)
    q = q.view(*shape, *q.shape[1:])
    k, v = layer.split_kv(layer.project_kv(x, positions).view(*shape, -1))
    return layer.output(x, attend(q, k, v, mask, layer.scale).flatten(0, 1))


def _recur(layer: Recurrent, x: Tensor, shape: torch.Size, forget: Tensor | None) -> Tensor:
    projected = layer.project(x)
    channels, width = layer.conv_weight.shape
    qkv = pad(projected.qkv.view(*shape, channels).mT, (width - 1, 0))
    qkv = silu(conv1d(qkv, layer.conv_weight.unsqueeze(1), groups=channels)).mT
    g, beta = _log_decay(layer, projected.decay), projected.beta.sigmoid()
    if forget is not None:
        g = g.masked_fill(forget.view(-1, *[1] * (g.ndim - 1)), -math.inf)
    operands = Operands.of(qkv.flatten(0, 1), g[None], beta[None], layer.geometry)
    o = delta_rule(*(t.reshape(*shape, *t.shape[2:]) for t in operands))
    return layer.output(o.flatten(0, 1), projected.gate)


def _log_decay(layer: Recurrent, a: Tensor) -> Tensor:
    """Eq. 2, without the care for extremes that serving takes."""
    assert isinstance(layer, GatedDeltaNet | KimiDeltaAttention)
    rate = layer.A_log.exp()
    if isinstance(layer, KimiDeltaAttention):
        rate = rate.unsqueeze(-1)
        if layer.lower_bound is not None:
            return layer.lower_bound * (rate * (a + layer.dt_bias)).sigmoid()
    return -rate * softplus(a + layer.dt_bias)
