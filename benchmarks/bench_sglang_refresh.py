"""What a refreshed hit costs in one pass and in two, in SGLang's real engine on the CPU.

    python -m benchmarks.bench_sglang_refresh --out build/sglang-refresh.json

Where SGLang and its stand-ins for CPU kernels are installed (``make test-sglang``). A tiny random model is served with
DASC-WR. Documents of one length are cached, then each is asked for with a few tokens more, one request at a time. The
hits take one pass and two by turns, in one run, so that both forms meet the machine in the same state. Reported are
medians of the forward with its refresh and of the time to the first token. CPU kernels written for clarity take their
time token by token, so what two passes cost besides, the second walk through the model, weighs less than on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.bench_sglang_load import UNCHECKED
from tests.sglang.engines import ROOT, Conversations, Turn, environment, run
from tests.sglang.tiny_models import FAMILIES, VOCAB, write_model

DOCUMENTS, PREFIX, NEW, W_MAX = 40, 160, 24, 64
FORMS = ("one_pass", "two_pass")


def measure(family: str, folder: Path, documents: int = DOCUMENTS) -> dict[str, dict[str, float]]:
    """Median seconds of each form: on the processor and by the clock for the forward, and to the first token."""
    rng = np.random.default_rng(0)
    tokens = [rng.integers(3, VOCAB, PREFIX + NEW).tolist() for _ in range(documents)]
    steps = [Conversations([[Turn(document[:end], 1)] for document in tokens]) for end in (PREFIX, PREFIX + NEW)]
    path = os.pathsep.join([str(ROOT / "tests" / "sglang" / "timers"), environment()["PYTHONPATH"]])
    served = run(
        write_model(family, folder / "model", blocks=8),
        steps,
        env=UNCHECKED | {"DASC_PLAN": "auto", "DASC_W_MAX": str(W_MAX), "DASC_LOAD_POLICY": "wr", "PYTHONPATH": path},
        max_mamba_cache_size=documents + 24,
        max_total_tokens=(documents + 4) * (PREFIX + NEW) + 4096,
        timeout_s=1800,
    )
    mark = "REFRESH TIMER "
    seen = [json.loads(line.split(mark, 1)[1]) for line in served.log.splitlines() if mark in line]
    hits = [answer for [answer] in served.answers[1]]
    assert len(seen) == documents
    assert all(hit.cached_tokens == PREFIX for hit in hits)
    for timing, hit in zip(seen, hits):
        timing["first_token_s"] = hit.first_token_s
    names = ("cpu_s", "wall_s", "first_token_s")
    return {
        form: {name: statistics.median(timing[name] for timing in seen if timing["form"] == form) for name in names}
        for form in FORMS
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=DOCUMENTS, help="cached and hit; half of them by each form")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for family in FAMILIES:
            found[family] = measure(family, Path(folder) / family, options.documents)
            for name in ("cpu_s", "wall_s", "first_token_s"):
                one, two = (found[family][form][name] for form in FORMS)
                print(f"{family:<12} {name:<14} one pass {one * 1e3:7.1f} ms, two {two * 1e3:7.1f} ms, {one / two:.2f}")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
