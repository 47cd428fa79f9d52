"""The operators that the model is given: :mod:`dasc.reference`, or anything else that offers them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from dasc.contract import DeltaRuleOutput


class DeltaRule(Protocol):
    """A recurrence over packed sequences, as :func:`dasc.reference.chunk_gdn` documents it."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        initial_state: Tensor | None = ...,
        cu_seqlens: Tensor | None = ...,
        use_qk_l2norm: bool = ...,
    ) -> DeltaRuleOutput: ...


class CausalConv(Protocol):
    """The short convolution; gives ``(y, final_state)``."""

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = ...,
        *,
        initial_state: Tensor | None = ...,
        cu_seqlens: Tensor | None = ...,
    ) -> tuple[Tensor, Tensor]: ...


class DeltaRuleOps(Protocol):
    """What :class:`~dasc.models.hybrid.model.HybridModel` computes its recurrent layers with; a module or an object."""

    @property
    def chunk_gdn(self) -> DeltaRule: ...
    @property
    def chunk_kda(self) -> DeltaRule: ...
    @property
    def recurrent_gdn(self) -> DeltaRule: ...
    @property
    def recurrent_kda(self) -> DeltaRule: ...
    @property
    def causal_conv1d(self) -> CausalConv: ...

    def softplus_gate(self, a: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor: ...
    def safe_gate(self, a: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor: ...
    def beta_gate(self, b: Tensor, *, allow_neg_eigval: bool = ...) -> Tensor: ...
