"""Names of bundled models and folders of others."""

import json
from pathlib import Path

import pytest
import torch

from dasc.models import read_checkpoint, zoo
from dasc.models.hybrid import load_hybrid
from dasc.models.tasks import VOCABULARY
from dasc.models.train.evaluate import examples, score
from dasc.models.train.recipes import RECIPES
from dasc.reference import static_horizons


def test_a_name_is_a_bundled_folder_and_anything_else_a_folder_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(zoo, "_ROOT", tmp_path)
    (tmp_path / "gdn").mkdir()
    assert zoo.model_folder("gdn") == tmp_path / "gdn"
    assert zoo.model_folder("some/gdn") == Path("some/gdn")
    assert zoo.model_folder(Path("kda-2")) == Path("kda-2")


def test_a_bundled_model_without_weights_says_how_to_train_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(zoo, "_ROOT", tmp_path)
    with pytest.raises(ValueError, match=r"weights of kda are not bundled yet: .*train kda .* FOLDER/model"):
        zoo.model_folder("kda")


@pytest.mark.parametrize("name", [*zoo.MODELS, *zoo.SPECIALISTS])
def test_a_bundled_model_is_what_its_recipe_trains(name: str):
    folder, recipe = zoo.model_folder(name), RECIPES[name]
    config, weights = load_hybrid(folder)
    assert config == recipe.config
    assert config.vocab_size == VOCABULARY
    assert (folder / "model.safetensors").stat().st_size < 10_000_000
    training = json.loads((folder / "training.json").read_text())
    assert training["parameters"] == sum(weight.numel() for weight in weights.values())
    log = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    steps = [entry["step"] for entry in log]
    assert steps == sorted(set(steps))
    assert steps[-1] == training["steps"] == recipe.steps


@pytest.mark.parametrize("name", zoo.MODELS)
def test_horizons_of_a_bundled_model_differ_as_widely_as_the_papers(name: str):
    """Figure 2: from a few tokens to thousands, in every layer."""
    checkpoint = read_checkpoint(zoo.model_folder(name))
    horizons = static_horizons(checkpoint.gate, checkpoint.gate_input(None))
    shortest, longest = horizons.amin(dim=1), horizons.amax(dim=1)
    assert (longest > 8 * shortest).all()
    low, median, high = torch.quantile(horizons.flatten(), torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64))
    assert low < 32 < median < 512 < high


@pytest.mark.parametrize("name", zoo.MODELS)
def test_a_bundled_model_answers_as_its_training_says(name: str):
    """The first of the same examples, so that their share of right answers is near that of all of them."""
    config, weights = load_hybrid(zoo.model_folder(name))
    scores = json.loads((zoo.model_folder(name) / "training.json").read_text())["scores"]
    for task in ("recall_multi", "latest_value", "common_words"):
        found = score(config, weights, examples(task, 128, 24)).right
        assert found == pytest.approx(scores[task]["128"]["right"], abs=0.12), task
