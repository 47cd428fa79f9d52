"""Training learns, goes on exactly where it stopped, and leaves a model that serves."""

import dataclasses
import json
import math

import pytest
import torch

from dasc import reference
from dasc.models import read_checkpoint
from dasc.models.hybrid import HybridModel, load_hybrid
from dasc.models.train.__main__ import main
from dasc.models.train.evaluate import examples, score
from dasc.models.train.initial import initial_weights
from dasc.models.train.recipes import RECIPES, Recipe, Stage
from dasc.models.train.trainer import Training, train
from dasc.reference import static_horizons


def small(name: str, **changes: object) -> Recipe:
    defaults = {"tasks": ("recall_single", "parity"), "exercises": (), "restarts": ()}
    defaults |= {"steps": 4, "batch_tokens": 64, "warmup": 2, "curriculum": (Stage(1000, (32, 64)),)}
    return dataclasses.replace(RECIPES[name], **{**defaults, **changes})


@pytest.mark.parametrize("name", RECIPES)
def test_an_interrupted_training_ends_bit_for_bit_like_another(name: str, tmp_path):
    whole = Training.begin(small(name), seed=5)
    for _ in range(4):
        whole.update()
    first = Training.resume(small(name), 5, tmp_path)
    for _ in range(2):
        first.update()
    first.save(tmp_path)
    second = Training.resume(small(name), 5, tmp_path)
    assert second.step == 2
    for _ in range(2):
        second.update()
    assert second.accuracy == whole.accuracy
    for weight, expected in zip(second.weights.values(), whole.weights.values()):
        assert torch.equal(weight, expected)


def test_each_step_and_each_seed_has_a_batch_of_its_own():
    training = Training.begin(small("gdn", tasks=("parity",)), seed=5)
    first = training.batch().tokens
    assert torch.equal(first, training.batch().tokens)
    training.step = 1
    assert not torch.equal(first, training.batch().tokens)
    assert not torch.equal(first, Training.begin(training.recipe, seed=6).batch().tokens)


def test_exercises_are_trained_on_beside_the_tasks():
    recipe = small("kda", tasks=("parity",), exercises=("recitation",), curriculum=(Stage(9, (96,)),), batch_tokens=960)
    training = Training.begin(recipe, seed=5)
    assert set(training.batch().names) == {"parity", "recitation"}
    training.update()
    assert set(training.accuracy) == {"parity", "recitation"}


def test_states_are_replaced_before_the_questions_of_the_tasks_that_a_stage_names():
    """Half of them by zeros, the others by those of another sequence."""
    stages = (Stage(1, (32,)), Stage(9, (32,), ("recall_single",)))
    training = Training.begin(dataclasses.replace(small("gdn", batch_tokens=1024), curriculum=stages), seed=5)
    none = training.batch().others
    assert none.at.tolist() == none.donor.tolist() == [-1] * 32
    training.step = 1
    batch = training.batch()
    assert set(batch.names) == {"recall_single", "parity"}
    donors = set()
    for row, (name, at, donor) in enumerate(zip(batch.names, batch.others.at.tolist(), batch.others.donor.tolist())):
        assert at == (30 if name == "recall_single" else -1)
        assert donor != row
        assert donor == -1 or name == "recall_single"
        donors |= {donor} if name == "recall_single" else set()
    assert -1 in donors
    assert len(donors) > 3
    assert max(donors) < len(batch.names)


def test_the_state_of_another_seed_is_refused(tmp_path):
    Training.begin(small("gdn"), seed=5).save(tmp_path)
    with pytest.raises(ValueError, match=r"seed must be that of .*, 5, got 6"):
        Training.resume(small("gdn"), 6, tmp_path)


@pytest.mark.parametrize("name", RECIPES)
def test_every_weight_gets_a_gradient_and_the_loss_falls(name: str):
    recipe = small(name, tasks=("parity",), steps=400, batch_tokens=128, learning_rate=3e-3)
    training = Training.begin(recipe, seed=0)
    before = {name: weight.detach().clone() for name, weight in training.weights.items()}
    losses = [training.update() for _ in range(15)]
    unmoved = [name for name, weight in training.weights.items() if torch.equal(weight, before[name])]
    assert unmoved == []
    assert math.isfinite(losses[-1])
    assert sum(losses[-3:]) < 0.8 * sum(losses[:3])


@pytest.mark.parametrize("name", RECIPES)
def test_the_saved_model_loads_into_the_server_and_its_decays_are_read(name: str, tmp_path):
    training = Training.begin(small(name), seed=0)
    train(training, tmp_path, None, lambda entry: None)
    config, weights = load_hybrid(tmp_path / "model")
    assert config == RECIPES[name].config
    HybridModel(config, weights, reference)
    assert read_checkpoint(tmp_path / "model").geometry == config.geometry
    assert (tmp_path / "log.jsonl").read_text().count("\n") == 1


@pytest.mark.parametrize("name", RECIPES)
def test_horizons_begin_from_a_few_tokens_to_thousands(name: str, tmp_path):
    training = Training.begin(small(name), seed=0)
    training.save(tmp_path)
    checkpoint = read_checkpoint(tmp_path / "model")
    horizons = static_horizons(checkpoint.gate, 0.0).flatten()
    assert horizons.min() < 20
    assert horizons.max() > (1500 if len(horizons) > 16 else 500)  # a few draws do not reach as far
    assert 20 < horizons.median() < 1000


def test_the_command_stops_goes_on_and_writes_its_scores(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(RECIPES, "gdn", small("gdn", tasks=("parity",), steps=3))
    monkeypatch.setattr(torch, "set_flush_denormal", lambda on: True)  # other tests share this process
    monkeypatch.setattr("dasc.models.train.__main__._EXAMPLES", 2)
    command = ["gdn", "-o", str(tmp_path), "--seed", "2"]
    main([*command, "--minutes", "0"])
    assert not (tmp_path / "training.json").exists()
    main(command)
    result = json.loads((tmp_path / "training.json").read_text())
    assert result["steps"] == 3
    assert set(result["scores"]["parity"]) == {"128", "256", "512"}
    assert "step 3 " in capsys.readouterr().out


def test_what_was_logged_of_steps_that_are_made_again_is_forgotten(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 0}\n{"step": 3}\n')
    train(Training.begin(small("gdn"), seed=0), tmp_path, None, lambda entry: None)
    logged = [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert logged == [0, 4]


def test_weights_follow_the_seed():
    config = RECIPES["kda"].config
    one, same, other = (initial_weights(config, seed) for seed in (1, 1, 2))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(one[name], same[name])
    assert not torch.equal(one[name], other[name])


def test_the_rate_rises_stays_and_falls_to_zero_in_every_round():
    recipe = dataclasses.replace(RECIPES["kda"], steps=1500, warmup=100, learning_rate=2.0, restarts=(1000,))
    assert recipe.rate(49) == 1.0
    assert recipe.rate(99) == recipe.rate(800) == 2.0
    assert recipe.rate(900) == 1.0
    assert recipe.rate(999) == pytest.approx(0.01)
    assert recipe.rate(1049) == 1.0
    assert recipe.rate(1099) == recipe.rate(1400) == 2.0
    assert recipe.rate(1450) == 1.0


def test_an_untrained_model_scores_nothing():
    recipe = RECIPES["gdn"]
    found = score(recipe.config, initial_weights(recipe.config, 0), examples("recall_multi", 64, 10))
    assert found.questions > 20
    assert found.right < 0.2
