"""The conclusions of docs/results.md on a few examples of each bundled model: this fails when one of them flips."""

import pytest

from dasc.eval.items.from_tasks import task_items
from dasc.eval.quality.arms import ArmSpec
from dasc.eval.quality.engine_backend import EngineLimits
from dasc.eval.quality.protocol import Protocol
from dasc.eval.quality.runs import run_bundled
from dasc.eval.quality.table import ALL_TASKS, make_table
from dasc.models.tasks import TASKS
from dasc.models.zoo import MODELS
from dasc.reference import RANDOM_MASK_SEEDS

W_MAX = 128
LARGE_W_MAX = 256
HORIZONS_TELL = ("kda", "gdn")
"""Not on ``kda-safe``, where units picked by static horizons answer no better than as many at random."""
INT8_NOISE = 0.02
"""Share of answers that may change, either way."""

ARMS = [
    ArmSpec("dense"),
    ArmSpec("nr", W_MAX),
    *(ArmSpec("random", W_MAX, seed) for seed in RANDOM_MASK_SEEDS[:3]),
    ArmSpec("nr", LARGE_W_MAX),
    ArmSpec("wr", LARGE_W_MAX),
    ArmSpec("int8-all"),
]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_the_headlines_hold(model: str):
    """Units of long horizons above as many at random; WR above NR at a large ``W_max``; INT8 within noise of dense."""
    items = task_items(list(TASKS), length=256, count=6)
    protocol = Protocol(block_items=len(items), slots=512, concurrency=32)
    result = run_bundled(items, model, ARMS, protocol, EngineLimits())
    row = next(row for row in make_table([result]).rows if row.task == ALL_TASKS)
    scores = {(cell.method, cell.w_max): cell.score for cell in row.cells}
    if model in HORIZONS_TELL:
        assert scores["nr", W_MAX] > scores["random", W_MAX]
    assert scores["wr", LARGE_W_MAX] > scores["nr", LARGE_W_MAX]
    assert abs(scores["int8-all", None] - scores["dense", None]) <= INT8_NOISE
