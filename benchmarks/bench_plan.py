"""`dasc plan` at Kimi-K3's size: time and bytes of reading, of the whole table, and of the placement alone."""

from pathlib import Path

import pytest
import torch

from dasc.models import read_checkpoint
from dasc.models.synthetic import GEOMETRIES, example_gate, write_checkpoint
from dasc.planner import summarise
from dasc.reference import assign_bundles, bundle_costs, select_units, static_horizons

K3 = GEOMETRIES["kimi-k3"]
OTHER_WEIGHTS_BYTES = 2 << 30


@pytest.fixture(
    scope="module",
    params=[pytest.param(torch.float32, marks=pytest.mark.usual), torch.bfloat16],
    ids=["fp32", "bf16"],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight shards with 2 GiB of other tensors (holes, so that they take no disk)."""
    path = tmp_path_factory.mktemp("kimi-k3")
    gate = example_gate(K3)
    return write_checkpoint(
        path, K3.family, gate, K3, decay_dtype=request.param, filler_bytes=OTHER_WEIGHTS_BYTES, shards=8
    )


def test_read(benchmark, folder: Path):
    checkpoint = benchmark(read_checkpoint, folder)
    reading = checkpoint.reading
    benchmark.extra_info.update(
        header_bytes=reading.header_bytes,
        index_bytes=reading.index_bytes,
        tensor_bytes=reading.tensor_bytes,
        requests=reading.requests,
    )
    # nothing but the decay parameters: one A_log a head (K3 stores more than it uses) and one bias a channel
    assert reading.tensor_bytes < 1.01 * (K3.num_units + 128 * K3.num_layers) * checkpoint_itemsize(folder)


def checkpoint_itemsize(folder: Path) -> int:
    return 2 if b'"BF16"' in (folder / "model-00001-of-00008.safetensors").open("rb").read(1 << 16) else 4


@pytest.mark.usual
def test_read_and_summarise_with_every_placement_at_tp_8(benchmark, folder: Path):
    summary = benchmark.pedantic(
        lambda: summarise(read_checkpoint(folder), (16, 64, 128, 512), ranks=(1, 2, 4, 8)), rounds=3
    )
    assert len(summary.windows) == 4


@pytest.mark.parametrize("ranks", [2, 8])
def test_permutation_of_head_bundles(benchmark, ranks: int):
    costs = bundle_costs(K3, select_units(static_horizons(example_gate(K3), 0.8), 64))
    owners = benchmark(assign_bundles, costs, ranks)
    loads = [int(costs[owners == r].sum()) for r in range(ranks)]
    benchmark.extra_info["loads"] = loads
    assert max(loads) - min(loads) < 128
