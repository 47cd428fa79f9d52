"""A linear-attention layer in a refresh in one pass, on a recurrence that can be followed by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dasc.geometry import StateGeometry
from dasc.layout import RaggedLayout
from dasc.sglang.config import Config
from dasc.sglang.one_pass import OnePass
from dasc.sglang.serving import Serving
from dasc.sglang.widening import Widening
from dasc.sglang.windows import Scratch, Window

HEADS, V, K, SLOTS = 2, 2, 3, 9
REQUESTS, LENGTHS = [4, 2, 7, 5], [2, 1, 3, 2]
WINDOWS = [Window(5, 9, (11, 12)), Window(4, 5, (13, 14, 15)), Window(7, 1, (16,))]  # request 2 has none
RETAINED = {"gdn": torch.tensor([[True, False]]), "kda": torch.tensor([[True, False, True, False, False, True]])}


class Backend:
    """State and rows of a sequence become half of what they were, and a token. A token's output is the state then.

    Slots are the requests' numbers. ``a`` and ``b`` have their tokens on the first axis, or on the second.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.states = torch.randn(SLOTS, HEADS, V, K, generator=generator)
        self.conv = torch.randn(SLOTS, 4, 3, generator=generator)
        cache = SimpleNamespace(temporal=self.states, conv=[self.conv])
        self.req_to_token_pool = SimpleNamespace(mamba2_layer_cache=lambda layer: cache)
        self.forward_metadata: Any = None
        self.planned = 0

    def init_forward_metadata(self, batch: Any) -> None:
        self.planned += 1
        self.forward_metadata = SimpleNamespace(mamba_cache_indices=batch.req_pool_indices.int(), batch=batch)

    def forward_extend(
        self, layer: Any, forward_batch: Any, mixed_qkv: Tensor, a: Tensor, b: Tensor, **kwargs: Any
    ) -> Tensor:
        assert self.forward_metadata.batch is forward_batch
        assert mixed_qkv[:, 0].equal(a.flatten())
        assert mixed_qkv[:, 0].equal(b.flatten())
        outputs, row = [], 0
        slots = forward_batch.req_pool_indices.tolist()
        for slot, length, prefix in zip(
            slots, forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens.tolist(), strict=True
        ):
            if prefix == 0:
                self.conv[slot] = 0
            for token in mixed_qkv[row : row + length, 0]:
                self.states[slot] = self.states[slot] / 2 + token
                self.conv[slot] = self.conv[slot] / 2 + token
                outputs.append(self.states[slot].sum(-1) + self.conv[slot].sum())
            row += length
        return torch.stack(outputs)[None]


def one_pass(kind: str, rows: int) -> OnePass:
    geometry = StateGeometry("test", kind, 2, (1,), HEADS, HEADS, V, K)  # type: ignore[arg-type]
    serving = Serving(Config(plan="auto", load_policy="wr"))
    serving.scratch = Scratch(8, 1, rows)
    serving.pool = SimpleNamespace(layout=RaggedLayout.from_mask(geometry, RETAINED[kind]))  # type: ignore[assignment]
    return OnePass(serving)


def new_batch() -> Any:
    """Of the new tokens, all after a prefix."""
    return SimpleNamespace(
        input_ids=torch.zeros(sum(LENGTHS), dtype=torch.int64),
        req_pool_indices=torch.tensor(REQUESTS),
        extend_seq_lens_cpu=LENGTHS,
        extend_prefix_lens=torch.ones(len(REQUESTS)),
        forward_mode="mixed",
    )


@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
@pytest.mark.parametrize("tokens_axis", [0, 1])
def test_new_tokens_go_on_from_stored_units_and_refreshed_ones(kind: str, rows: int, tokens_axis: int) -> None:
    hooks, backend, batch = one_pass(kind, rows), Backend(), new_batch()
    widening = Widening.of(REQUESTS, LENGTHS, WINDOWS)
    values = torch.arange(1.0, widening.total + 1)
    gates = values[:, None] if tokens_axis == 0 else values[None, :, None]
    stored, stored_rows = backend.states.clone(), backend.conv.clone()
    wide = SimpleNamespace(forward_mode="extend")

    def forward(runner: Any, forward_batch: Any) -> Any:
        assert forward_batch is wide
        hooks.plan(Backend.init_forward_metadata, backend, wide)
        return hooks.extend(
            Backend.forward_extend, backend, layer=SimpleNamespace(layer_id=1), forward_batch=wide,
            mixed_qkv=values[:, None], a=gates, b=gates, q=None, linear_attn_output=object(),
        )  # fmt: skip

    outputs = hooks.forward(forward, None, batch, wide, widening)

    # the same, sequence by sequence
    retained = RETAINED[kind].view(HEADS, 1, -1).expand(HEADS, V, K)
    expected, row = [], 0
    for request, length, added in zip(REQUESTS, LENGTHS, widening.added):
        state, rows_of_request = torch.zeros(HEADS, V, K), torch.zeros(4, 3)
        for place in range(length + added):
            if place == added:
                state = torch.where(retained, stored[request], state) if added else stored[request]
                rows_of_request = stored_rows[request]
            state = state / 2 + values[row]
            rows_of_request = rows_of_request / 2 + values[row]
            expected.append(state.sum(-1) + rows_of_request.sum())
            row += 1
        torch.testing.assert_close(backend.states[request], state)
        torch.testing.assert_close(backend.conv[request], rows_of_request)
    torch.testing.assert_close(outputs, torch.stack(expected)[None])
    others = [slot for slot in range(SLOTS) if slot not in REQUESTS]
    assert backend.states[others].equal(stored[others])
    assert backend.planned == 1 + -(-len(WINDOWS) // rows)
    assert (batch.forward_mode, batch.mamba_cow_dst_indices, batch.extend_seq_lens_cpu) == ("extend", None, LENGTHS)


def test_other_forwards_are_left_alone() -> None:
    hooks, backend = one_pass("gdn", 2), Backend()
    seen: list[Any] = []
    hooks.plan(lambda *args: seen.append(args), backend, "batch")
    hooks.extend(lambda *args, **kwargs: seen.append((args, kwargs)), backend, 1, a=2)
    assert seen == [(backend, "batch"), ((backend, 1), {"a": 2})]


def test_a_forward_that_fails_leaves_nothing_behind() -> None:
    hooks = one_pass("gdn", 2)

    def fails(runner: Any, batch: Any) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        hooks.forward(fails, None, new_batch(), SimpleNamespace(), Widening.of(REQUESTS, LENGTHS, WINDOWS))
    test_other_forwards_are_left_alone()
    assert hooks._split is None


def test_a_forward_that_goes_round_the_layers_is_noticed() -> None:
    with pytest.raises(AssertionError, match="every recurrent layer"):
        one_pass("gdn", 2).forward(
            lambda runner, batch: None, None, new_batch(), SimpleNamespace(), Widening.of(REQUESTS, LENGTHS, WINDOWS)
        )
