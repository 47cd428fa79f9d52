"""Inputs of the pooled recurrences, for the reference's tests and those of each fast path."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from dasc.contract import DecayGate, RefreshMerge
from tests.inputs import REGIMES, DeltaRuleCase


@dataclass(frozen=True)
class PooledCase:
    """Packed sequences over a pool; :meth:`build` makes the tensors from the seed."""

    lengths: tuple[int, ...]
    replays: tuple[int, ...] | None  # tokens of each sequence that are replayed; None: no refresh
    H: int
    ratio: int
    K: int
    V: int
    channel_gate: bool
    gated: str | None = None  # "softplus", "safe" or None: gates are given
    regime: str = "typical"
    without_slot: bool = False  # the first sequence has none
    seed: int = 0

    def build(self, dtype: torch.dtype = torch.float64, pool_dtype: torch.dtype | None = None) -> dict[str, object]:
        """Arguments of ``prefill_*``. Slots no sequence has are NaN."""
        N, HV = len(self.lengths), self.H * self.ratio
        gen = torch.Generator().manual_seed(self.seed)
        case = DeltaRuleCase(
            1, sum(self.lengths), self.H, self.ratio, self.K, self.V, self.channel_gate, self.regime, self.seed,
            states=N,
        )  # fmt: skip
        x: dict[str, object] = dict(case.build(dtype))
        states = x.pop("initial_state")
        indices = torch.randperm(N + 3, generator=gen)[:N]
        pool = torch.full((N + 3, HV, self.V, self.K), torch.nan, dtype=pool_dtype or dtype)
        pool[indices] = states.to(pool.dtype)
        if self.without_slot and N:
            pool[indices[0]] = torch.nan
            indices[0] = -1
        x |= {"pool": pool, "state_indices": indices, "cu_seqlens": torch.tensor([0, *self.lengths]).cumsum(0)}
        if self.gated:
            unit = (HV, self.K) if self.channel_gate else (HV,)
            x["g"] = torch.randn(x["g"].shape, generator=gen, dtype=torch.float64).to(dtype)
            x["beta"] = torch.randn(x["beta"].shape, generator=gen, dtype=torch.float64).to(dtype)
            x["gate"] = DecayGate(
                torch.randn(HV, generator=gen, dtype=torch.float64).to(dtype),
                torch.randn(unit, generator=gen, dtype=torch.float64).to(dtype),
                -5.0 if self.gated == "safe" else None,
                allow_neg_eigval=self.seed % 2 == 1,
            )
        if self.replays is not None:
            keep = torch.rand((HV, self.K) if self.channel_gate else (HV,), generator=gen) < 0.5
            x["refresh"] = RefreshMerge(keep, torch.tensor(self.replays, dtype=torch.int64))
        return x


@st.composite
def pooled_cases(draw: st.DrawFn, max_length: int = 20, max_sequences: int = 3, **fixed: object) -> PooledCase:
    lengths = draw(st.lists(st.integers(0, max_length), min_size=0, max_size=max_sequences).map(tuple))
    replays = tuple(draw(st.integers(0, length)) for length in lengths) if draw(st.booleans()) else None
    options = {
        "lengths": st.just(lengths),
        "replays": st.just(replays),
        "H": st.integers(1, 2),
        "ratio": st.sampled_from([1, 2, 4]),
        "K": st.sampled_from([1, 2, 5, 8]),
        "V": st.sampled_from([1, 3, 4, 7]),
        "channel_gate": st.booleans(),
        "gated": st.sampled_from([None, "softplus", "safe"]),
        "regime": st.sampled_from(REGIMES),
        "without_slot": st.booleans(),
        "seed": st.integers(0, 2**31 - 1),
    }
    drawn = {name: draw(strategy) for name, strategy in options.items() if name not in fixed}
    return PooledCase(**{**drawn, **fixed})  # type: ignore[arg-type]


def in_other_order(pool: Tensor) -> Tensor:
    """The same values with ``K`` before ``V`` in memory: another stride order of the same axes."""
    return pool.mT.clone(memory_format=torch.contiguous_format).mT


def in_fp64(x: dict[str, object]) -> dict[str, object]:
    """The same arguments, values untouched."""
    doubled = {name: t.double() if torch.is_tensor(t) and t.is_floating_point() else t for name, t in x.items()}
    if "gate" in x:
        doubled["gate"] = x["gate"]._replace(A_log=x["gate"].A_log.double(), dt_bias=x["gate"].dt_bias.double())
    return doubled
