"""The one registry of delta-rule inputs that tests and benchmarks draw from: structure plus an integer seed."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

REGIMES = (
    "typical",  # gates and betas as trained models have them
    "slow",  # g near 0
    "zero_g",  # g exactly 0
    "fast",  # g very negative
    "mixed",  # 0 beside -5 and -60 in one sequence
    "beta_edges",  # beta in {0, 1}
    "zero_keys",
    "repeated_keys",
    "large_norms",
)


@dataclass(frozen=True)
class DeltaRuleCase:
    """Structure of one input; :meth:`build` makes the tensors from the seed."""

    B: int
    T: int
    H: int
    ratio: int
    K: int
    V: int
    channel_gate: bool
    regime: str = "typical"
    seed: int = 0
    with_state: bool = True
    states: int | None = None  # number of initial states when packed; B otherwise

    @property
    def HV(self) -> int:
        return self.H * self.ratio

    def build(self, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
        """``q k v g beta`` and, if asked for, ``initial_state``; generated in FP64 and then cast."""
        gen = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=gen, dtype=torch.float64)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=gen, dtype=torch.float64)

        B, T, H, HV, K, V = self.B, self.T, self.H, self.HV, self.K, self.V
        gate_shape = (B, T, HV, K) if self.channel_gate else (B, T, HV)
        q = torch.nn.functional.normalize(normal(B, T, H, K), dim=-1)
        k = torch.nn.functional.normalize(normal(B, T, H, K), dim=-1)
        v = normal(B, T, HV, V)
        beta = uniform(B, T, HV)
        g = -(uniform(*gate_shape) * 2)
        if self.regime == "slow":
            g = g * 1e-4
        elif self.regime == "zero_g":
            g = torch.zeros(gate_shape, dtype=torch.float64)
        elif self.regime == "fast":
            g = g * 20 - 5
        elif self.regime == "mixed":
            choice = (uniform(*gate_shape) * 4).long()
            g = torch.tensor([0.0, -1e-3, -5.0, -60.0], dtype=torch.float64)[choice]
        elif self.regime == "beta_edges":
            beta = (beta > 0.5).double()
        elif self.regime == "zero_keys":
            k = k * (uniform(B, T, H, 1) > 0.5)
        elif self.regime == "repeated_keys" and T:
            k = k[:, :1].expand(B, T, H, K).contiguous()
        elif self.regime == "large_norms":
            q, v = q * 30, v * 1e3
        tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
        if self.with_state:
            tensors["initial_state"] = normal(self.states if self.states is not None else B, HV, V, K)
        return {name: tensor.to(dtype) for name, tensor in tensors.items()}


@st.composite
def delta_rule_cases(
    draw: st.DrawFn, channel_gate: bool | None = None, max_T: int = 70, **fixed: object
) -> DeltaRuleCase:
    """Draw structure only; d_k != d_v is common, lengths include 0, 1 and both sides of 64."""
    edges = [t for t in (0, 1, 2, 3, 15, 16, 17, 63, 64, 65) if t <= max_T]
    options = {
        "B": st.integers(1, 2),
        "T": st.one_of(st.sampled_from(edges), st.integers(0, max_T)),
        "H": st.integers(1, 2),
        "ratio": st.sampled_from([1, 2, 4]),
        "K": st.sampled_from([1, 2, 5, 8]),
        "V": st.sampled_from([1, 3, 4, 7]),
        "channel_gate": st.booleans() if channel_gate is None else st.just(channel_gate),
        "regime": st.sampled_from(REGIMES),
        "seed": st.integers(0, 2**31 - 1),
        "with_state": st.booleans(),
    }
    drawn = {name: draw(strategy) for name, strategy in options.items() if name not in fixed}
    return DeltaRuleCase(**{**drawn, **fixed})  # type: ignore[arg-type]
