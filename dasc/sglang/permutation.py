"""The compute permutation of ``hybrid`` placement, applied to a checkpoint's weights one by one as they are loaded."""

from __future__ import annotations

from collections import defaultdict

from torch import Tensor

from dasc.geometry import StateGeometry
from dasc.models.families import family_of_name
from dasc.models.hybrid.permute import layer_axes, permute_weight, refusal
from dasc.placement import check_head_order


class HeadPermutation:
    """Brings the head-coupled weights of the recurrent layers into a placement's compute order (B.1 (a), step 7).

    The weights are those of the whole model. A rank that then takes a contiguous block of heads, as tensor parallelism
    does, has the heads that the placement gives to it.

    Args:
        geometry: of the whole model.
        head_order: int64 ``[L, HV]``.

    Raises:
        ValueError: for an order of another geometry.
    """

    def __init__(self, geometry: StateGeometry, head_order: Tensor) -> None:
        check_head_order(geometry, head_order)
        self._geometry = geometry
        self._family = family_of_name(geometry.family)
        self._orders = dict(zip(geometry.recurrent_layers, head_order))
        self._forms = layer_axes(geometry)
        self._axes = {part: axis for form in self._forms for part, axis in form.items()}
        self._seen: defaultdict[int, set[str]] = defaultdict(set)

    def permute(self, name: str, weight: Tensor) -> Tensor:
        """One weight in compute order: itself when it has no heads of a recurrent layer.

        Args:
            name: in the checkpoint.
            weight: on any device; not written to.

        Raises:
            ValueError: for a weight of a recurrent layer that is unknown, misshapen, quantised or packed.
        """
        place = self._family.layer_tensor(name)
        if place is None or place[0] not in self._orders:
            return weight
        block, part = place
        if part not in self._axes:
            raise refusal(name, weight)
        self._seen[block].add(part)
        return permute_weight(name, weight, self._axes[part], self._orders[block], self._geometry)

    def check_complete(self) -> None:
        """Raise unless every weight of every recurrent layer has come.

        Raises:
            ValueError: naming a layer, and what has come of it.
        """
        for block in self._orders:
            seen = self._seen[block]
            if not any(seen == set(form) for form in self._forms):
                raise ValueError(
                    "placement 'hybrid' permutes the heads of weights as they load, but of recurrent block "
                    f"{block} only {', '.join(sorted(seen)) or 'nothing'} came: another way of loading weights "
                    "(--load-format) allows 'storage' only"
                )
