"""`models rm` removes one revision of one repository of the hub's cache, and nothing of another."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.base.errors import ConfigError, ModelError
from forebay.cli.main import main
from forebay.formats.hub import remove
from forebay.formats.hub_names import revisions

FIRST, SECOND = "1" * 40, "2" * 40
Put = Callable[..., Path]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "hub"


@pytest.fixture
def put(cache: Path) -> Put:
    """Write a snapshot as the hub's library does; its folder."""

    def write(repo: str, commit: str = FIRST, *, ref: str = "main", kind: str = "models", **files: str) -> Path:
        folder = cache / f"{kind}--{repo.replace('/', '--')}"
        snapshot = folder / "snapshots" / commit
        for part in (folder / "blobs", folder / "refs", snapshot):
            part.mkdir(parents=True, exist_ok=True)
        (folder / "refs" / ref).write_text(commit)
        for name, text in {"config.json": "{}", "model.safetensors": repo, **files}.items():
            blob = folder / "blobs" / text.encode().hex()
            blob.write_text(text)
            (snapshot / name).symlink_to(Path("../../blobs") / blob.name)
        return snapshot

    return write


def here() -> list[tuple[str, str]]:
    return [(repo, revision) for repo, revision, _ in revisions()]


@pytest.mark.parametrize("name", ["org/a", "org/b", "org/c"])
def test_remove_with_equal_commits_in_other_repositories_removes_the_named_one(
    name: str, put: Put, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for repo in ("org/a", "org/b", "org/c"):
        put(repo)
    data = put("org/a", kind="datasets")
    assert main(["models", "rm", name]) == 0
    assert here() == [(repo, "main") for repo in ("org/a", "org/b", "org/c") if repo != name]
    assert all((folder / "model.safetensors").read_text() == repo for repo, _, folder in revisions())
    assert (data / "model.safetensors").exists()
    assert not (cache / f"models--{name.replace('/', '--')}").exists()
    assert f"removed {name}" in capsys.readouterr().out


def test_remove_a_revision_keeps_the_others_of_its_repository(put: Put, cache: Path) -> None:
    old, new = put("org/a", FIRST, ref="v1", old="one"), put("org/a", SECOND, new="two")
    put("org/b", FIRST, ref="v1")
    assert main(["models", "rm", "org/a"]) == 2  # two are called so
    assert main(["models", "rm", "org/a@v1"]) == 0
    assert here() == [("org/a", "main"), ("org/b", "v1")]
    assert not old.exists()
    assert {(new / name).read_text() for name in ("config.json", "model.safetensors", "new")} == {"{}", "org/a", "two"}
    assert not (cache / "models--org--a" / "blobs" / b"one".hex()).exists()


def test_remove_a_gguf_file_keeps_a_file_of_the_same_name_and_commit(put: Put) -> None:
    files = {"m-Q8_0.gguf": "eight", "m-Q4_K_M.gguf": "four"}
    kept, folder = put("org/b", **files), put("org/a", **files)
    assert remove(folder / "m-Q8_0.gguf") == len("eight")
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "m-Q4_K_M.gguf"}
    assert all((kept / name).read_text() == text for name, text in files.items())


def test_remove_names_of_other_letters_are_told_apart(put: Put) -> None:
    put("org/Model"), put("org/model")
    assert main(["models", "rm", "org/model"]) == 0
    assert here() == [("org/Model", "main")]
    assert main(["models", "rm", "ORG/MODEL"]) == 0
    assert here() == []


def test_remove_a_linked_repository_or_snapshot_removes_the_link(put: Put, cache: Path) -> None:
    snapshot = put("org/a")
    (cache / "models--org--link").symlink_to("models--org--a")
    snapshot.with_name(SECOND).symlink_to(FIRST)
    assert remove(cache / "models--org--link" / "snapshots" / FIRST) == 0
    assert remove(snapshot.with_name(SECOND)) == 0
    assert here() == [("org/a", "main")]
    assert (snapshot / "model.safetensors").read_text() == "org/a"


@pytest.mark.parametrize("several", [False, True])
def test_remove_files_that_another_repository_links_to_is_refused(several: bool, put: Put, cache: Path) -> None:
    snapshot, other = put("org/a"), put("org/b", SECOND)
    if several:
        put("org/a", "3" * 40, ref="v3", **{"model.safetensors": "three"})
    (other / "model.safetensors").unlink()
    (other / "model.safetensors").symlink_to(f"../../../models--org--a/blobs/{b'org/a'.hex()}")
    with pytest.raises(ConfigError, match=r"org/b has a link to .*: remove org/b first"):
        remove(snapshot)
    remove(other)
    assert (snapshot / "model.safetensors").read_text() == "org/a"
    remove(snapshot)
    assert not snapshot.exists()


def test_remove_blobs_in_a_folder_that_two_repositories_share_is_refused(put: Put, cache: Path) -> None:
    snapshot = put("org/a")
    other = put("org/b")
    for blob in (cache / "models--org--b" / "blobs").iterdir():
        blob.rename(cache / "models--org--a" / "blobs" / blob.name)
    (cache / "models--org--b" / "blobs").rmdir()
    (cache / "models--org--b" / "blobs").symlink_to("../models--org--a/blobs")
    with pytest.raises(ConfigError, match="org/b has a link to"):
        remove(snapshot)
    assert (other / "model.safetensors").read_text() == "org/b"


def test_remove_of_a_blob_on_another_disk_removes_its_link(put: Put, cache: Path, tmp_path: Path) -> None:
    snapshot = put("org/a")
    blob = cache / "models--org--a" / "blobs" / b"org/a".hex()
    blob.rename(tmp_path / "elsewhere")
    blob.symlink_to(tmp_path / "elsewhere")
    remove(snapshot)
    assert here() == []
    assert (tmp_path / "elsewhere").read_text() == "org/a"


def test_remove_of_an_incomplete_repository_says_what_is_missing(put: Put, cache: Path) -> None:
    snapshot = put("org/a")
    put("org/b")
    (cache / "models--org--a" / "blobs" / b"org/a".hex()).unlink()
    with pytest.raises(ModelError, match=r"models--org--a is incomplete|Blob missing.*remove .*models--org--a"):
        remove(snapshot)
    assert ("org/b", "main") in here()


def test_remove_used_repository_is_refused_and_its_twin_is_not(put: Put, capsys: pytest.CaptureFixture[str]) -> None:
    """The check is of what is removed: equal commits do not matter."""
    from forebay.formats.store import hold

    used = put("org/b")
    put("org/a")
    held = hold(used / "model.safetensors")
    assert main(["models", "list", "--json"]) == 0
    users = {model["name"]: bool(model["used_by"]) for model in json.loads(capsys.readouterr().out)}
    if users["org/b"]:  # a system without /proc/locks has none
        assert main(["models", "rm", "org/b"]) == 2
    assert main(["models", "rm", "org/a"]) == 0
    assert here() == [("org/b", "main")]
    os.close(held)
