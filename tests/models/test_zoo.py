"""Names of bundled models and folders of others."""

from pathlib import Path

import pytest

from dasc.models import zoo


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
