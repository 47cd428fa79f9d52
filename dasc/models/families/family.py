"""What a model family is: how its config.json and its tensors' names say geometry and gate."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from dasc.geometry import Kind, StateGeometry
from dasc.models.config import Config
from dasc.models.gate_parameters import GateParameters

DecayName = Literal["A_log", "dt_bias"]
DECAY_NAMES: tuple[DecayName, ...] = ("A_log", "dt_bias")


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        name: registry name; ``StateGeometry.family`` of its models.
        model_types: values of ``model_type`` at the top of config.json.
        kind: ``"gdn"`` or ``"kda"``.
        geometry: reads the geometry from the language model's config (``text_config`` where there is one).
        lower_bound: reads the safe gate's lower bound from the same config; ``None`` means the softplus gate.
        usual_lower_bound: what ``lower_bound`` gives for the released models.
        module: the attention module's name in tensor names, ``layers.N.<module>.A_log``.
        default_gate_input: ``a_s`` of eq. 2.
        calibrated: whether the paper calibrated ``a_s`` on a model of this family.
        example_config: the inverse of ``geometry`` and ``lower_bound``: a config.json in the family's own form.
        prefix: what stands before ``layers.`` in the family's own checkpoints.
        A_log_shape: stored shape of ``A_log`` in the family's own checkpoints, from the number of heads ``HV``.
        A_log_padded: whether ``A_log`` may be longer than ``HV``, with only its first ``HV`` values in use.
    """

    name: str
    model_types: tuple[str, ...]
    kind: Kind
    geometry: Callable[[Config], StateGeometry]
    lower_bound: Callable[[Config], float | None]
    usual_lower_bound: float | None
    module: str
    default_gate_input: float
    calibrated: bool
    example_config: Callable[[StateGeometry, GateParameters], dict[str, object]]
    prefix: str = "model."
    A_log_shape: Callable[[int], tuple[int, ...]] = lambda heads: (heads,)
    A_log_padded: bool = False

    def match(self, tensor: str) -> tuple[int, DecayName] | None:
        """Block number and parameter of a decay tensor's name; ``None`` for any other tensor.

        Multi-token-prediction modules (``mtp.layers.N...``) are other tensors.
        """
        part = self.layer_tensor(tensor)
        if part is None or part[1] not in DECAY_NAMES:
            return None
        return part[0], "A_log" if part[1] == "A_log" else "dt_bias"

    def layer_tensor(self, tensor: str) -> tuple[int, str] | None:
        """Block number and name within the attention module of one of its tensors; ``None`` for any other tensor.

        Multi-token-prediction modules are other tensors here too.
        """
        found = re.fullmatch(
            r"(?:model\.|model\.language_model\.|language_model\.model\.|language_model\.)?"
            rf"layers\.(0|[1-9][0-9]{{0,5}})\.{self.module}\.(.+)",
            tensor,
        )
        return None if found is None else (int(found[1]), found[2])

    def shape_text(self, geometry: StateGeometry, name: DecayName) -> str:
        """The stored shapes that :meth:`takes_shape` accepts, in words."""
        heads = geometry.num_value_heads
        if self.kind == "gdn":
            return f"[{heads}]"
        if name == "dt_bias":
            return f"[{heads * geometry.head_k_dim}]"
        longer = " or more heads, the first in use" if self.A_log_padded else ""
        return f"[{heads}] or [1, 1, {heads}, 1]{longer}"

    def takes_shape(self, geometry: StateGeometry, name: DecayName, shape: tuple[int, ...]) -> bool:
        """Whether a decay tensor stored with this shape belongs to the geometry."""
        heads = geometry.num_value_heads
        if self.kind == "gdn":
            return shape == (heads,)
        if name == "dt_bias":
            return shape == (heads * geometry.head_k_dim,)
        flat = shape[2:3] if len(shape) == 4 and (shape[0], shape[1], shape[3]) == (1, 1, 1) else shape
        return flat == (heads,) or (self.A_log_padded and len(flat) == 1 and flat[0] > heads)
