"""The encoder's file of a GGUF model: named, found beside the model, or left out."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.base.errors import ConfigError, ModelError
from forebay.config.resolve import HERE, Survey, resolve


@pytest.fixture
def beside(embedded_model: Path, tmp_path: Path) -> Path:
    """A GGUF model, beside which is a file with an encoder's name that is none."""
    path = tmp_path / "model.gguf"
    path.symlink_to(embedded_model)
    (tmp_path / "mmproj-F16.gguf").write_bytes(b"GGUF")
    return path


def test_file_beside_the_model_that_is_no_encoder_is_left_out(beside: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = resolve({"model_path": str(beside)})
    assert config.engine.pictures.mmproj is None
    assert "encoder_not_used" in caplog.text
    assert str(beside.with_name("mmproj-F16.gguf")) in caplog.text


def test_file_that_is_named_and_is_no_encoder_is_refused(beside: Path) -> None:
    with pytest.raises(ModelError, match="mmproj-F16"):
        resolve({"model_path": str(beside), "mmproj": str(beside.with_name("mmproj-F16.gguf"))})


def test_encoder_that_is_named_does_not_exist_or_is_for_a_folder_is_refused(beside: Path, tmp_path: Path) -> None:
    for model, why in ((beside, "there is no such file"), (tmp_path / "folder", "is no GGUF model")):
        survey = Survey(find=lambda *_, path=model: path)
        with pytest.raises(ConfigError, match=why):
            resolve({"mmproj": "/nowhere/mmproj.gguf"}, survey=survey)


@pytest.mark.parametrize("given", [None, "none", "named", "mmproj-F16.gguf"])
def test_encoder_is_read_with_the_model_unless_left_out(given: str | None, beside: Path) -> None:
    file = beside.with_name("mmproj-F16.gguf")
    asked: list[Path | None] = []

    def model(path: Path, draft_head: bool, mmproj: Path | None) -> object:
        asked.append(mmproj)
        return HERE.model(path, draft_head, None)

    flags = {"model_path": str(beside), "mmproj": str(file) if given == "named" else given}
    config = resolve(flags, survey=Survey(model=model))
    wanted = None if given == "none" else file
    assert asked == [wanted]
    assert config.engine.pictures.mmproj == (None if wanted is None else str(wanted))
    setting = next(setting for setting in config.settings if setting.name == "mmproj")
    assert setting.reason == {None: "beside the model"}.get(given, "the command line")


def test_encoders_that_fit_equally_are_refused_unless_one_is_named(beside: Path) -> None:
    named = beside.with_name("mmproj-model-F16.gguf")
    named.write_bytes(b"GGUF")
    survey = Survey(model=lambda path, draft_head, mmproj: HERE.model(path, draft_head, None))
    with pytest.raises(ModelError, match=r"mmproj-F16\.gguf, mmproj-model-F16\.gguf.*--mmproj"):
        resolve({"model_path": str(beside)}, survey=survey)
    config = resolve({"model_path": str(beside), "mmproj": "mmproj-model-F16.gguf"}, survey=survey)
    assert config.engine.pictures.mmproj == str(named)
