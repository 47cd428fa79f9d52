"""How long an omission hurts: what is left, tokens later, of an error of the state. Beyond the paper.

Eq. 1 is ``S_t = S_{t-1} A_t P_t + beta_t v_t k_t^T`` with ``A_t = Diag(alpha_t)`` and ``P_t = I - beta_t k_t k_t^T``.
What is added does not depend on the state, so two states that see the same inputs differ by ``D_t = D_{t-1} A_t P_t``.
``P_t`` is symmetric with eigenvalues 1 and ``1 - beta_t ||k_t||^2``: for ``||k_t|| <= 1`` and ``0 <= beta_t <= 2`` it
makes nothing longer. Hence, in the Frobenius norm of a head,

    ``||D_t|| <= ||D_{t-1} A_t|| <= max_k alpha_{t,k} ||D_{t-1}||``.

For GDN, whose decay is one number a head, this is ``||D_t|| <= exp(g_1 + .. + g_t) ||D_0||``. For KDA no bound holds
channel by channel: ``P_t`` carries what is missing in a fast channel into slow ones, where it stays. What holds is the
head's slowest channel at every step, but for the first step, before which only omitted channels differ.
"""

from __future__ import annotations

import bisect
import math

import torch
from torch import Tensor


def omission_bound(error: Tensor, g: Tensor) -> Tensor:
    """Most that can be left of an error of the state after each of ``T`` tokens, if both states see the same inputs.

    Holds for keys of at most unit length and ``beta`` within ``[0, 2]``, whatever keys, values and ``beta`` are.

    Args:
        error: ``D_0`` ``[N, HV, V, K]``, floating point: one state less the other.
        g: log-decay of the tokens since, at most 0, ``[N, T, HV]`` (GDN) or ``[N, T, HV, K]`` (KDA).

    Returns:
        ``[N, T + 1, HV]`` float64, Frobenius norm of a head; entry ``t`` is after ``t`` tokens.

    Raises:
        ValueError: for other shapes or dtypes, or ``g`` that is positive or NaN.
    """
    _check(error, g)
    start = error.double().norm(dim=(-2, -1))[:, None]
    if g.ndim == 3 or g.shape[1] == 0:
        slowest = g.double() if g.ndim == 3 else g.double().amax(dim=-1)
        return torch.cat([start, start * slowest.cumsum(dim=1).exp()], dim=1)
    first = (error.double() * g[:, 0, :, None, :].double().exp()).norm(dim=(-2, -1))[:, None]
    later = g[:, 1:].double().amax(dim=-1).cumsum(dim=1).exp()
    return torch.cat([start, first, first * later], dim=1)


def omission_estimate(error: Tensor, g: Tensor) -> Tensor:
    """What would be left if every channel decayed for itself, ``P_t`` left out. No bound for KDA, see the module.

    Arguments, result and errors as :func:`omission_bound`, with which it agrees for GDN.
    """
    _check(error, g)
    by_channel = error.double().norm(dim=-2)[:, None]  # [N, 1, HV, K]
    decays = (g if g.ndim == 4 else g.unsqueeze(-1)).double().cumsum(dim=1).exp()
    left: Tensor = torch.cat([by_channel, by_channel * decays], dim=1).norm(dim=-1)
    return left


def remaining_share(horizons: Tensor, mask: Tensor, tokens: float, epsilon: float = 1e-3) -> float:
    """Share of the omitted units that is still missing after so many tokens, from the weights alone.

    A unit of horizon ``H`` has ``epsilon ** (tokens / H)`` left; this is the root of the mean square over the omitted
    units of all layers, each counting the same. Like :func:`omission_estimate` it leaves ``P_t`` out.

    Args:
        horizons: ``H_s`` in tokens, ``[L, U]`` float64, positive.
        mask: ``[L, U]`` bool, true where kept.
        tokens: since the hit, not negative.
        epsilon: that the horizons were computed with.

    Returns:
        Within ``[0, 1]``; 0 when nothing is omitted.

    Raises:
        ValueError: for other shapes, dtypes or ranges.
    """
    if horizons.dtype != torch.float64 or not (horizons > 0).all():
        raise ValueError(f"horizons must be float64 and positive, got {horizons.dtype}")
    if mask.dtype != torch.bool or mask.shape != horizons.shape:
        raise ValueError(f"mask must be torch.bool {list(horizons.shape)}, got {mask.dtype} {list(mask.shape)}")
    if not tokens >= 0 or not 0 < epsilon < 1:
        raise ValueError(f"tokens must be >= 0 and epsilon within (0, 1), got {tokens} and {epsilon}")
    local = horizons[~mask]
    if not local.numel():
        return 0.0
    return float((2 * math.log(epsilon) * tokens / local).exp().mean().sqrt())


def settle_tokens(horizons: Tensor, mask: Tensor, tolerance: float, epsilon: float = 1e-3) -> int:
    """Fewest tokens after which at most ``tolerance`` of the omitted units is missing (:func:`remaining_share`).

    A hit with so many new prompt tokens need not be refreshed: when its answer begins, the omission has faded.

    Args:
        horizons: as in :func:`remaining_share`; finite where ``mask`` is false.
        mask: likewise.
        tolerance: within ``(0, 1]``. At 1 nothing is refreshed.
        epsilon: likewise.

    Raises:
        ValueError: for other shapes, dtypes or ranges, or an omitted unit that never decays.
    """
    if not 0 < tolerance <= 1:
        raise ValueError(f"tolerance must be within (0, 1], got {tolerance}")
    if remaining_share(horizons, mask, 0, epsilon) <= tolerance:
        return 0
    longest = float(horizons[~mask].max())
    if math.isinf(longest):
        raise ValueError("horizons of omitted units must be finite: one that never decays never settles")
    enough = math.ceil(longest * math.log(tolerance) / math.log(epsilon)) + 1
    return bisect.bisect_left(
        range(enough), -tolerance, key=lambda tokens: -remaining_share(horizons, mask, tokens, epsilon)
    )


def _check(error: Tensor, g: Tensor) -> None:
    if error.ndim != 4 or not error.is_floating_point():
        raise ValueError(f"error must be floating-point [N, HV, V, K], got {error.dtype} {list(error.shape)}")
    N, HV, _, K = error.shape
    if not g.is_floating_point() or g.ndim not in (3, 4) or g.shape[0] != N or list(g.shape[2:]) not in ([HV], [HV, K]):
        raise ValueError(
            f"g must be floating-point [{N}, T, {HV}] or [{N}, T, {HV}, {K}], got {g.dtype} {list(g.shape)}"
        )
    if not (g <= 0).all():
        raise ValueError("g must be a log-decay, at most 0, got positive values or NaN")
