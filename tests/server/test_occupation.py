"""Which checkpoints `/update_weights_from_disk` may name: all their files are below --weights-root (C33)."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.base.errors import InvalidRequest
from forebay.server.admin.weights import _below


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkpoint of files, and the cache of a hub; beside it a file that is nobody's business."""
    (tmp_path / "secret").write_text("secret")
    plain = tmp_path / "root" / "plain"
    plain.mkdir(parents=True)
    (plain / "model.safetensors").write_text("weights")
    repository = tmp_path / "root" / "models--org--name"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for name in ("model.safetensors", "model.gguf"):
        (repository / "blobs" / f"hash-{name[6:]}").write_text("weights")
        (snapshot / name).symlink_to(f"../../blobs/hash-{name[6:]}")
    return tmp_path / "root"


@pytest.mark.parametrize("name", ["models--org--name/snapshots/0123", "models--org--name/snapshots/0123/model.gguf"])
def test_below_snapshot_of_a_hub_cache_is_served_by_its_own_name(root: Path, name: str) -> None:
    assert _below(str(root), name) == str(root / name)


@pytest.mark.parametrize("name", ["0123", "0123/model.gguf"])
def test_below_root_inside_a_repository_follows_links_to_its_blobs(root: Path, name: str) -> None:
    snapshots = root / "models--org--name" / "snapshots"
    assert _below(str(snapshots), name) == str(snapshots / name)


def test_below_link_inside_the_root_is_followed(root: Path) -> None:
    (root / "latest").symlink_to("plain")
    assert _below(str(root), "latest") == str(root / "latest")


@pytest.mark.parametrize("target", ["/etc/passwd", "../../secret", "../../gone"])
@pytest.mark.parametrize("folder", ["plain", "models--org--name/snapshots/0123"])
def test_below_file_that_links_out_of_the_root_is_refused_by_name(root: Path, folder: str, target: str) -> None:
    target = target.replace("../../", "../" * (2 + folder.count("/")))
    (root / folder / "config.json").symlink_to(target)
    with pytest.raises(InvalidRequest, match=r"config\.json' is a link that leads out of --weights-root"):
        _below(str(root), folder)


def test_below_later_part_that_links_out_of_the_root_is_refused_by_name(root: Path) -> None:
    (root / "m-00001-of-00002.gguf").write_text("weights")
    (root / "m-00002-of-00002.gguf").symlink_to("../secret")
    with pytest.raises(InvalidRequest, match=r"m-00002-of-00002\.gguf' is a link that leads out of --weights-root"):
        _below(str(root), "m-00001-of-00002.gguf")


@pytest.mark.parametrize("name", ["..", "../secret", "/etc", "away", "away/secret"])
def test_below_path_out_of_the_root_is_refused(root: Path, name: str) -> None:
    (root / "away").symlink_to("..")
    with pytest.raises(InvalidRequest, match="is not below --weights-root"):
        _below(str(root), name)


def test_below_circle_of_links_and_nul_are_refused_typed(root: Path) -> None:
    (root / "circle").symlink_to("circle")
    for name in ("circle", "a\0b"):
        with pytest.raises(InvalidRequest, match="model_path"):
            _below(str(root), name)
