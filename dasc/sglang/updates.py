"""New weights in a running server: what the plan makes of them, and what placement ``hybrid`` does not allow."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.runtime_context import get_parallel

from dasc.sglang import targets
from dasc.sglang.serving import Serving

logger = logging.getLogger(__name__)

IN_CHECKPOINT_FORMAT = (None, "flattened_bucket")
"""Load formats of weights by their names in the checkpoint, which the model's ``load_weights`` takes."""


class WeightUpdates:
    """The hooks of one process, both of type AROUND, which it adds to those of ``serving``.

    SGLang empties the cache after an update, unless it is asked not to: then old checkpoints are used with new weights,
    as its own would be.

    Args:
        serving: of this process.
    """

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._warned = False
        serving.hooks |= {
            targets.UPDATE_FROM_TENSOR: self.update_from_tensor,
            targets.AFTER_UPDATE: self.after_update,
        }

    def update_from_tensor(
        self,
        original: Callable[..., tuple[bool, str]],
        updater: Any,
        named_tensors: Any,
        load_format: str | None = None,
    ) -> tuple[bool, str]:
        """Weights that are written past ``load_weights`` would be in the model's order of heads, not the placement's.

        A weight that cannot be permuted is an answer to who sent it, too. SGLang would stop the server.
        """
        if self._serving.permutation is None:
            return original(updater, named_tensors, load_format)
        if load_format not in IN_CHECKPOINT_FORMAT:
            return False, (
                f"dasc: load_format {load_format!r} writes weights in the model's order of heads, and placement hybrid "
                "has another: send them by their names in the checkpoint, without a load_format, or use storage"
            )
        try:
            return original(updater, named_tensors, load_format)
        except ValueError as error:
            return False, f"dasc: {error}; the weights before it are updated: send them all again"

    def after_update(
        self, original: Callable[..., tuple[bool, str]], manager: Any, recv_req: Any, success: bool, message: str
    ) -> tuple[bool, str]:
        """Say once that the plan stays as it is: which units are kept is now a matter of quality alone."""
        if not self._warned and get_parallel().tp_rank == 0:
            self._warned = True
            logger.warning(
                "dasc: weights were updated; units are still kept or omitted by the decay parameters that the server "
                "started with. Start it again, with a plan of the new weights, if these have changed much"
            )
        return original(manager, recv_req, success, message)
