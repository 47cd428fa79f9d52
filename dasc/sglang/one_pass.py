"""A refresh in one pass: windows run in the forward of the batch that hits, ahead of their requests' new tokens.

Attention takes a window and the new tokens after it as one extend; the page table names the cached K/V all along. In a
linear-attention layer they part. The windows run first, from nothing, in their requests' own state slots. Then what
SGLang loaded goes back over them: the units that the checkpoint retains and the convolution rows, so that the omitted
units alone are those of the windows. The new tokens go on from there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from dasc.sglang import targets
from dasc.sglang.serving import Serving
from dasc.sglang.widened_batch import rows_of, windows_batch
from dasc.sglang.widening import Widening

T = TypeVar("T")


@dataclass
class _Part:
    """Tokens that linear attention takes as a batch of their own.

    Attributes:
        batch: SGLang's, of these tokens alone.
        rows: theirs in the widened batch, int64.
        metadata: SGLang's for ``batch``, once planned.
    """

    batch: Any
    rows: Tensor
    metadata: Any = None


@dataclass
class _Split:
    """The parts of the forward that is running.

    Attributes:
        windows: at most so many windows in each as there is memory for their stored states.
        new: the batch that SGLang asked for.
        layers: linear-attention layers that have run.
    """

    windows: list[_Part]
    new: _Part
    layers: int = 0


class OnePass:
    """Runs batches in one pass, by hooks of type AROUND that it adds to those of ``serving``.

    Args:
        serving: of this process, with load policy ``wr``.
    """

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._split: _Split | None = None
        self._retained: dict[int, Tensor] | None = None
        serving.hooks |= dict.fromkeys(targets.PLAN_LINEAR, self.plan)
        serving.hooks |= dict.fromkeys(targets.EXTEND_LINEAR, self.extend)

    def forward(
        self, original: Callable[..., T], runner: Any, batch: Any, wide: Any, widening: Widening, *args: Any, **kw: Any
    ) -> T:
        """SGLang's forward over a widened batch. What it returns, and leaves in ``batch``, is as for ``batch`` alone.

        Args:
            batch: whose states are loaded by this forward, into slots that hold zeros.
            wide: ``batch``, widened by ``widening``.
        """
        device = batch.input_ids.device
        assert self._serving.scratch is not None
        if self._retained is None:
            self._retained = self._retained_units(device)
        split = self._split = _Split(
            [
                _Part(windows_batch(windows, device), rows_of(rows, device))
                for windows, rows in widening.parts(self._serving.scratch.rows)
            ],
            _Part(batch, rows_of(widening.new_rows, device)),
        )
        try:
            result = original(runner, wide, *args, **kw)
        finally:
            self._split = None
        assert split.layers == len(self._retained), "every recurrent layer has met its windows"
        # what SGLang notes in a batch as it runs
        batch.forward_mode = wide.forward_mode
        batch.mamba_cow_src_indices = batch.mamba_cow_dst_indices = batch.mamba_clear_indices = None
        return result

    def plan(self, original: Callable[..., None], backend: Any, forward_batch: Any) -> None:
        """Metadata of a linear-attention backend: for each part its own."""
        if self._split is None:
            original(backend, forward_batch)
            return
        for part in (*self._split.windows, self._split.new):
            original(backend, part.batch)
            part.metadata = backend.forward_metadata

    def extend(self, original: Callable[..., Tensor], backend: Any, *args: Any, **kwargs: Any) -> Tensor:
        """One linear-attention layer: the windows, the boundary, the new tokens."""
        split = self._split
        if split is None:
            return original(backend, *args, **kwargs)
        assert not args, "SGLang calls this with keywords"
        assert self._retained is not None
        kwargs.pop("linear_attn_output", None)  # room for an output of all tokens

        def run(part: _Part) -> Tensor:
            backend.forward_metadata = part.metadata
            of_part = {name: _rows(kwargs[name], part.rows) for name in ("mixed_qkv", "a", "b")}
            return original(backend, **kwargs | of_part | {"forward_batch": part.batch})

        layer = kwargs["layer"].layer_id
        cache, outputs = backend.req_to_token_pool.mamba2_layer_cache(layer), []
        states, (conv,) = cache.temporal, cache.conv
        for part in split.windows:
            slots = part.metadata.mamba_cache_indices.long()
            stored, stored_rows = states[slots], conv[slots]
            states.index_fill_(0, slots, 0)
            outputs.append(run(part))
            refreshed = states[slots]
            states[slots] = torch.where(self._retained[layer], stored, refreshed, out=refreshed)
            conv[slots] = stored_rows
        outputs.append(run(split.new))
        split.layers += 1
        tokens = kwargs["mixed_qkv"].shape[0]
        together = outputs[-1].new_empty((1, tokens, *outputs[-1].shape[2:]))
        for part, output in zip((*split.windows, split.new), outputs, strict=True):
            together[:, part.rows] = output
        return together

    def _retained_units(self, device: torch.device) -> dict[int, Tensor]:
        """By block: true where its state ``[HV, V, K]`` is of retained units, bool ``[HV, 1, K]`` or ``[HV, 1, 1]``."""
        pool = self._serving.pool
        assert pool is not None
        geometry = pool.layout.geometry
        heads = (geometry.num_value_heads, 1, geometry.units_per_head)
        return {
            block: mask.view(heads).to(device)
            for block, mask in zip(geometry.recurrent_layers, pool.layout.mask, strict=True)
        }


def _rows(values: Tensor, rows: Tensor) -> Tensor:
    """Of tokens, which are on the first axis of two, else on the second."""
    return values.index_select(0 if values.ndim == 2 else 1, rows)
