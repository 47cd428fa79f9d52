"""The convolution and GDN prefill of ``sgl_kernel.mamba``."""

import torch
from torch import Tensor

from . import delta_rule


def _convolve(
    x: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None, activation: object
) -> tuple[Tensor, Tensor]:
    """A causal depthwise convolution of one sequence.

    Args:
        x: ``[channels, T]``.
        rows: ``[channels, width - 1]`` inputs before it, oldest first.
        weight: ``[channels, width]``.
        bias: ``[channels]``.
        activation: ``None`` or a name of SiLU.

    Returns:
        The output, and the last ``width - 1`` inputs.
    """
    inputs = torch.cat([rows, x], dim=1).float()
    y = torch.nn.functional.conv1d(
        inputs, weight.float().unsqueeze(1), None if bias is None else bias.float(), groups=len(weight)
    )
    if activation is not None:
        assert activation in ("silu", "swish", True)
        y = torch.nn.functional.silu(y)
    return y.to(x.dtype), inputs[:, 1 - weight.shape[1] :]


def causal_conv1d_fn_cpu(
    x, weight, bias=None, activation="silu", conv_states=None, has_initial_state=None, cache_indices=None,
    query_start_loc=None, *args, **kwargs,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Prefill of packed sequences ``[channels, T]``; states ``[slots, channels, width - 1]`` are updated in place."""
    y = torch.empty_like(x)
    bounds = query_start_loc.tolist()
    for n, (slot, start, end) in enumerate(zip(cache_indices.tolist(), bounds, bounds[1:])):
        if start == end:
            continue
        rows = conv_states[slot].to(x.dtype)
        if not has_initial_state[n]:
            rows = torch.zeros_like(rows)
        y[:, start:end], rows = _convolve(x[:, start:end], rows, weight, bias, activation)
        conv_states[slot] = rows.to(conv_states.dtype)
    return y


def causal_conv1d_update_cpu(
    x, conv_states, weight, bias=None, activation="silu", conv_state_indices=None, *args, **kwargs
):  # type: ignore[no-untyped-def]
    """One token of each sequence, ``[sequences, channels]``."""
    y = torch.empty_like(x)
    for n, slot in enumerate(conv_state_indices.tolist()):
        out, rows = _convolve(x[n].unsqueeze(1), conv_states[slot].to(x.dtype), weight, bias, activation)
        y[n], conv_states[slot] = out[:, 0], rows.to(conv_states.dtype)
    return y


def chunk_gated_delta_rule_cpu(
    q, k, v, g, beta, initial_state=None, initial_state_indices=None, cu_seqlens=None, *args,
    use_qk_l2norm_in_kernel=True, **kwargs,
):  # type: ignore[no-untyped-def]  # fmt: skip
    """Prefill; states are updated in place."""
    o = delta_rule(q, k, v, g, beta, initial_state, initial_state_indices, cu_seqlens, use_qk_l2norm_in_kernel)
    return o.to(v.dtype), None, None
