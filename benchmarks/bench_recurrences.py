"""The recurrences, their blockwise forms and the convolution on the CPU, against transformers' PyTorch functions.

    pytest benchmarks/bench_recurrences.py [--size smoke]

Both run in turn, so that a slow spell of the machine meets both; ``times_faster`` in ``extra_info``, the median of the
rounds' ratios, is the figure to read. Prefill also gives its multiple of the arithmetic floor: the operations that the
blockwise form needs, at the rate of a large matrix product timed in the same rounds. Decode and convolution give theirs
of copying the state and the tokens. Values are checked after timing, against FP64 where the peer's error is wanted.
"""

import statistics
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import (
    chunk_kimi_delta_attention,
    recurrent_kimi_delta_attention,
)
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from dasc import fast, reference
from dasc.contract import DeltaRuleOutput
from tests.inputs import DeltaRuleCase
from tests.reference.measures import errors

pytestmark = pytest.mark.usefixtures("threads")

D, CHUNK = 128, 64
PER_TOKEN = ("q", "k", "v", "g", "beta")
CHUNKED = {
    "gdn": (fast.chunk_gdn, reference.recurrent_gdn, torch_chunk_gated_delta_rule),
    "kda": (fast.chunk_kda, reference.recurrent_kda, chunk_kimi_delta_attention),
}
STEPPED = {
    "gdn": (fast.recurrent_gdn, reference.recurrent_gdn, torch_recurrent_gated_delta_rule),
    "kda": (fast.recurrent_kda, reference.recurrent_kda, recurrent_kimi_delta_attention),
}


class Interleaved:
    """Other work to time before each round of a benchmark."""

    def __init__(self, **others: Callable[[], object]) -> None:
        self.others = others
        self.seconds: dict[str, list[float]] = {name: [] for name in others}
        self.results: dict[str, object] = {}

    def run(self) -> None:
        for name, other in self.others.items():
            started = time.perf_counter()
            self.results[name] = other()
            self.seconds[name].append(time.perf_counter() - started)

    def over(self, name: str, ours: list[float]) -> float:
        """Median of the rounds' ratios: how much longer ``name`` took."""
        return statistics.median(other / own for other, own in zip(self.seconds[name][-len(ours) :], ours))


def prefill_flop(x: dict[str, Tensor]) -> int:
    """Operations of the blockwise form, triangles counted as triangles.

    A token reads the state twice and writes to it once, ``6 K V``; meets the earlier half of its block by key and by
    query, ``2 C K``; and gathers their writes, in the solve and in the output, ``2 C V``.
    """
    tokens, K, (HV, V) = x["q"].shape[0] * x["q"].shape[1], x["q"].shape[3], x["v"].shape[2:]
    return tokens * HV * (6 * K * V + 2 * CHUNK * K + 2 * CHUNK * V)


def peer_call(peer: Callable, x: dict[str, Tensor]) -> Callable[[], DeltaRuleOutput]:
    """The peer's call, its state ``[N, HV, K, V]``."""
    state = x["initial_state"].mT.contiguous()

    def call() -> DeltaRuleOutput:
        o, final = peer(*(x[name] for name in PER_TOKEN), initial_state=state, output_final_state=True)
        return DeltaRuleOutput(o, final.mT)

    return call


def worst_errors(got: DeltaRuleOutput, exact: DeltaRuleOutput) -> dict[str, float]:
    """Worst (sequence, head), relative RMS."""
    return {part: float(error.max()) for part, error in zip(("o", "state"), errors(got, exact), strict=True)}


@pytest.mark.parametrize(
    ("kind", "B", "T", "H", "ratio"),
    [
        pytest.param("gdn", 1, 2048, 16, 1, marks=pytest.mark.usual),
        pytest.param("kda", 1, 2048, 16, 1, marks=pytest.mark.usual),
        pytest.param("gdn", 1, 2048, 8, 2, marks=pytest.mark.usual),
        pytest.param("gdn", 4, 512, 16, 1, marks=pytest.mark.usual),
        pytest.param("kda", 4, 256, 16, 1, marks=pytest.mark.usual),
        ("gdn", 1, 100, 16, 1),
        ("kda", 1, 100, 16, 1),
    ],
)
def test_prefill(benchmark, smoke: bool, kind: str, B: int, T: int, H: int, ratio: int):
    ours, oracle, peer = CHUNKED[kind]
    H = 2 if smoke else H
    x = DeltaRuleCase(B, T, H, ratio, D, D, kind == "kda").build(torch.float32)
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    others = Interleaved(peer=peer_call(peer, x), matmul=lambda: a @ b)
    got = benchmark.pedantic(ours, kwargs=x, setup=others.run, rounds=5, warmup_rounds=1)
    exact = oracle(**{name: t.double() for name, t in x.items()})
    mine, theirs = worst_errors(got, exact), worst_errors(others.results["peer"], exact)
    assert all(mine[part] <= theirs[part] for part in mine), f"error {mine} against the peer's {theirs}"
    if benchmark.stats is not None:  # None when benchmarks are only tried out
        rounds = benchmark.stats.stats.data
        rate = 2 * 1024**3 / min(others.seconds["matmul"])
        benchmark.extra_info |= {
            "shape": {"B": B, "T": T, "H": H, "HV": H * ratio, "K": D, "V": D},
            "dtype": "float32",
            "threads": torch.get_num_threads(),
            "peer": peer.__name__,
            "times_faster": others.over("peer", rounds),
            "times_faster_at_best": min(others.seconds["peer"]) / min(rounds),
            "gflop": prefill_flop(x) / 1e9,
            "matmul_gflop_per_s": rate / 1e9,
            "times_the_floor": min(rounds) * rate / prefill_flop(x),
            "error": mine,
            "peer_error": theirs,
        }


@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_prefill_of_a_ragged_batch(benchmark, smoke: bool, kind: str):
    """The peer has no variable length: it takes the sequences one after another."""
    lengths = (70, 3, 1) if smoke else (700, 3, 129, 1, 64, 300, 40, 811)
    ours, oracle, peer = CHUNKED[kind]
    x = DeltaRuleCase(1, sum(lengths), 8, 1, D, D, kind == "kda", states=len(lengths)).build(torch.float32)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    alone = [
        {name: t[:, begin:end] if name in PER_TOKEN else t[n : n + 1] for name, t in x.items()}
        for n, (begin, end) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()))
    ]
    calls = [peer_call(peer, own) for own in alone]
    others = Interleaved(peer=lambda: [call() for call in calls])
    got = benchmark.pedantic(ours, kwargs=x | {"cu_seqlens": cu_seqlens}, setup=others.run, rounds=5, warmup_rounds=1)
    exact = oracle(**{name: t.double() for name, t in x.items()}, cu_seqlens=cu_seqlens)
    torch.testing.assert_close(got.o.double(), exact.o, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.final_state.double(), exact.final_state, rtol=1e-5, atol=1e-5)
    if benchmark.stats is not None:
        benchmark.extra_info |= {
            "lengths": lengths,
            "shape": {"H": 8, "HV": 8, "K": D, "V": D},
            "threads": torch.get_num_threads(),
            "peer": peer.__name__,
            "times_faster": others.over("peer", benchmark.stats.stats.data),
        }


@pytest.mark.parametrize("B", [1, pytest.param(32, marks=pytest.mark.usual)])
@pytest.mark.parametrize("kind", ["gdn", "kda"])
def test_decode(benchmark, kind: str, B: int):
    """One token of each sequence. The floor is to read each state and to write a new one."""
    ours, oracle, peer = STEPPED[kind]
    x = DeltaRuleCase(B, 1, 16, 1, D, D, kind == "kda").build(torch.float32)
    others = Interleaved(peer=peer_call(peer, x), copy=lambda: x["initial_state"].clone())
    got = benchmark.pedantic(ours, kwargs=x, setup=others.run, rounds=20, warmup_rounds=2)
    exact = oracle(**{name: t.double() for name, t in x.items()})
    torch.testing.assert_close(got.o.double(), exact.o, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.final_state.double(), exact.final_state, rtol=1e-5, atol=1e-5)
    if benchmark.stats is not None:
        rounds = benchmark.stats.stats.data
        benchmark.extra_info |= {
            "shape": {"B": B, "H": 16, "HV": 16, "K": D, "V": D},
            "threads": torch.get_num_threads(),
            "state_bytes": x["initial_state"].nbytes,
            "peer": peer.__name__,
            "times_faster": others.over("peer", rounds),
            "share_of_copy_bandwidth": others.over("copy", rounds),
        }


@pytest.mark.parametrize(("B", "T"), [pytest.param(1, 2048, marks=pytest.mark.usual), (32, 1)])
def test_convolution(benchmark, B: int, T: int):
    """The peer is torch's own convolution, which wants channels before tokens and gives them back so."""
    C = 8192
    gen = torch.Generator().manual_seed(0)
    x, weight, state = (torch.randn(*shape, generator=gen) for shape in ((B, T, C), (C, 4), (B, C, 3)))

    def torchs() -> Tensor:
        rows = torch.cat([state, x.mT], dim=-1)
        return torch.nn.functional.silu(torch.nn.functional.conv1d(rows, weight.unsqueeze(1), groups=C)).mT.contiguous()

    others = Interleaved(peer=torchs, copy=lambda: x.clone())
    got = benchmark.pedantic(
        fast.causal_conv1d, (x, weight), {"initial_state": state}, setup=others.run, rounds=10, warmup_rounds=1
    )
    torch.testing.assert_close(got.y, others.results["peer"], rtol=1e-4, atol=1e-5)
    if benchmark.stats is not None:
        rounds = benchmark.stats.stats.data
        benchmark.extra_info |= {
            "shape": {"B": B, "T": T, "channels": C, "width": 4},
            "threads": torch.get_num_threads(),
            "peer": "torch.nn.functional.conv1d",
            "times_faster": others.over("peer", rounds),
            "share_of_copy_bandwidth": others.over("copy", rounds),
        }
