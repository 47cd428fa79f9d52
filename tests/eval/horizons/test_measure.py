"""Observed horizons are those of the decays that layers computed with, and even prefixes alone choose a_s."""

import json
import math
from pathlib import Path

import pytest
import torch
from scipy.stats import spearmanr

from dasc.eval.horizons import SCALED_TARGETS, HorizonSettings, Prefix, measure_horizons, task_prefixes
from dasc.eval.horizons.measure import Agreement, _histogram, observe
from dasc.eval.task_runs import load_task_model
from dasc.models import read_checkpoint
from dasc.models.hybrid import load_hybrid, save_hybrid
from dasc.models.hybrid.weights import rms_norm
from dasc.models.tasks import TASKS
from dasc.reference import empirical_horizons, state_magnitude, static_horizons
from tests.eval.task_models import save_task_model
from tests.models.hybrid_runs import assert_close, isolated, random_tokens

KINDS = (("gdn", "softplus"), ("kda", "softplus"), ("kda", "safe"))
SOURCE = {"prefixes": "random"}


def random_prefixes(count: int, seed: int = 0) -> list[Prefix]:
    ids = [tuple(random_tokens(12 + number, seed + number).tolist()) for number in range(count)]
    return [Prefix(number, 12, tokens, len(tokens)) for number, tokens in enumerate(ids)]


def without_gate_inputs(folder: Path, kind: str, gate: str) -> Path:
    """A model whose gate input is 0 for every token: it decays as its weights say for ``a_s = 0``."""
    config, weights = load_hybrid(save_task_model(folder, kind, gate))
    last = "in_proj_ba" if kind == "gdn" else "f_b_proj"
    save_hybrid(folder, config, {n: torch.zeros_like(w) if last in n else w for n, w in weights.items()})
    return folder


@pytest.mark.parametrize(("kind", "gate"), KINDS)
def test_with_constant_gates_the_observed_horizons_are_the_static_ones(tmp_path: Path, kind: str, gate: str):
    """Every layer, head and channel in its place."""
    folder = without_gate_inputs(tmp_path / "model", kind, gate)
    horizons, _ = observe(load_task_model(folder), range(20))
    assert_close(horizons, static_horizons(read_checkpoint(folder).gate, 0.0), 1e-6)
    report = measure_horizons(folder, random_prefixes(4), HorizonSettings(gate_input=0.0, epsilon=0.01), source=SOURCE)
    assert report.fixed.empirical.pooled == (1.0, 1.0, 1.0, 0)
    assert report.calibrated.gate_input == 0.0
    assert min(report.objective) < 1e-6


@pytest.mark.parametrize(("kind", "gate"), KINDS)
def test_what_is_observed_of_a_prefix_is_its_own_decay_and_its_last_state(tmp_path: Path, kind: str, gate: str):
    model = load_task_model(save_task_model(tmp_path / "model", kind, gate))
    tokens = random_tokens(23, 4)
    horizons, magnitude = observe(model, tokens.tolist())
    block = model.blocks[0]
    projected = block.mixer.project(rms_norm(model.embedding[tokens], block.mixer_norm, block.eps))
    g = block.mixer.log_decay(projected.decay, model.ops)
    assert_close(horizons[0], empirical_horizons(g[None])[0].flatten(), 1e-5)
    _, states, _ = isolated(model, tokens)
    assert_close(magnitude, state_magnitude(states.temporal[:, 0], kind), 1e-5)
    shorter, _ = observe(model, tokens[:10].tolist())
    assert not torch.allclose(shorter, horizons)


def test_correlations_are_within_layers_and_a_constant_layer_has_none():
    static = torch.tensor([[1.0, 2, 3, 4], [5, 5, 5, 5], [4, 3, 2, 1]], dtype=torch.float64)
    observed = torch.rand(3, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = Agreement.of(static, observed)
    for prefix in range(3):
        for layer in (0, 2):
            expected = spearmanr(static[layer], observed[prefix, layer]).statistic
            assert math.isclose(found.values[prefix][layer], expected, abs_tol=1e-12)
        assert found.values[prefix][1] is None
    assert found.layers[1] is None
    assert found.pooled.ignored == 3
    assert found.layers[0].median == sorted(found.values[p][0] for p in range(3))[1]


def test_even_prefixes_choose_and_odd_ones_validate(tmp_path: Path):
    folder = save_task_model(tmp_path / "model")
    prefixes = random_prefixes(5)
    report = measure_horizons(folder, prefixes, source=SOURCE)
    assert report.fixed.prefixes == (0, 1, 2, 3, 4)
    assert report.calibrated.prefixes == (1, 3)
    assert report.fixed.gate_input == read_checkpoint(folder).family.default_gate_input
    other = random_prefixes(5, seed=50)
    mixed = [own if number % 2 == 0 else new for number, (own, new) in enumerate(zip(prefixes, other))]
    changed = measure_horizons(folder, mixed, source=SOURCE)
    assert changed.objective == report.objective
    assert changed.calibrated.empirical != report.calibrated.empirical
    swapped = measure_horizons(folder, [other[0], *prefixes[1:]], source=SOURCE)
    assert swapped.objective != report.objective
    assert swapped.fixed.empirical.values[1:] == report.fixed.empirical.values[1:]


def test_units_are_counted_in_bins_of_equal_ratio():
    static = torch.tensor([[1.0, 9.9, 10.0, math.inf]], dtype=torch.float64)
    found = _histogram(static, torch.tensor([[100.0, 1.0, 1.0, 1.0]], dtype=torch.float64))
    edges = found["edges_tokens"]
    assert (edges[0], edges[8], edges[16]) == (1.0, 10.0, 100.0)
    assert len(edges) == 18
    for name, expected in (("static", {0: 1, 7: 1, 8: 1, 16: 1}), ("empirical", {0: 3, 16: 1})):
        assert {bin: count for bin, count in enumerate(found[name][0]) if count} == expected
    never = _histogram(torch.full((1, 2), math.inf, dtype=torch.float64), torch.full((1, 2), math.inf))
    assert never == {"edges_tokens": [1.0, 10**0.125], "static": [[2]], "empirical": [[2]]}


def test_a_run_that_was_interrupted_goes_on_with_the_same_report_and_json_holds_it(tmp_path: Path):
    folder, prefixes = save_task_model(tmp_path / "model", "gdn"), random_prefixes(3)
    units = tmp_path / "units.jsonl"

    def interrupt(prefix: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_horizons(folder, prefixes, source=SOURCE, units_path=units, progress=interrupt)
    report = measure_horizons(folder, prefixes, source=SOURCE, units_path=units)
    assert report == measure_horizons(folder, prefixes, source=SOURCE)
    values = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert values["fixed"]["empirical"]["pooled"]["median"] == report.fixed.empirical.pooled.median
    assert values["fixed"]["magnitude"]["layers"][0]["q3"] == report.fixed.magnitude.layers[0].q3
    assert [p["tokens"] for p in values["prefixes"]] == [12, 13, 14]
    with pytest.raises(ValueError, match="cannot be resumed: prefixes_sha256"):
        measure_horizons(folder, random_prefixes(3, seed=9), source=SOURCE, units_path=units)


def test_one_prefix_can_not_both_choose_and_validate(tmp_path: Path):
    with pytest.raises(ValueError, match="prefixes must be at least two"):
        measure_horizons(save_task_model(tmp_path / "model"), random_prefixes(1), source=SOURCE)


def test_the_bundled_models_prefixes_are_of_all_tasks_and_lengths():
    found = task_prefixes(SCALED_TARGETS, 8)
    assert [p.target for p in found] == [target for target in SCALED_TARGETS for _ in range(8)]
    assert {p.source for p in found} == set(TASKS)
    assert all(0 < len(p.tokens) <= p.target for p in found)
    assert len({p.tokens for p in found}) == len(found)
    assert found == task_prefixes(SCALED_TARGETS, 8)
    assert found != task_prefixes(SCALED_TARGETS, 8, seed=1)
    with pytest.raises(ValueError, match="targets must be at least 32 tokens, got 16"):
        task_prefixes((16,), 1)
