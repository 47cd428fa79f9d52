"""What figures depend on."""

from pathlib import Path

from dasc.eval.provenance import described, folder_sha256


def test_a_models_fingerprint_changes_with_its_configuration_and_nothing_else(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "log.txt").write_text("of no matter")
    first = folder_sha256(tmp_path)
    (tmp_path / "log.txt").write_text("changed")
    assert folder_sha256(tmp_path) == first
    (tmp_path / "config.json").write_text("{ }")
    assert folder_sha256(tmp_path) != first


def test_a_description_holds_model_settings_and_versions(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    values = described(tmp_path, {"seed": 3})
    assert (values["model"], values["model_sha256"], values["seed"]) == (tmp_path.name, folder_sha256(tmp_path), 3)
    assert {"dasc", "torch", "numpy"} <= set(values["versions"])
