"""Files that this user's processes load or obey: who could have written them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.base.errors import ConfigError
from forebay.base.trust import closed_folder, has_trusted_writers, private_folder, why_untrusted

STRANGER = 12345
Give = Callable[[Path], None]


@pytest.fixture
def give_away(monkeypatch: pytest.MonkeyPatch) -> Give:
    """Return a function that gives a path to another user; without root, this process becomes another user instead."""

    def give(path: Path) -> None:
        if os.geteuid() == 0:
            os.chown(path, STRANGER, -1)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    return give


def status(mode: int, uid: int, gid: int = 7) -> os.stat_result:
    return os.stat_result((mode, 0, 0, 1, uid, gid, 0, 0, 0, 0))


@pytest.mark.parametrize(
    ("mode", "uid", "trusted"),
    [
        (0o644, os.geteuid(), True),
        (0o644, 0, True),
        (0o644, os.geteuid() + STRANGER, False),
        (0o664, os.geteuid(), False),
        (0o646, os.geteuid(), False),
        (0o646, 0, False),
    ],
)
def test_has_trusted_writers_owner_and_mode(mode: int, uid: int, trusted: bool) -> None:
    folder = status(stat.S_IFDIR | 0o755, os.geteuid())
    assert has_trusted_writers(status(stat.S_IFREG | mode, uid), folder) == trusted


def test_has_trusted_writers_group_of_a_shared_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    file, folder = status(stat.S_IFREG | 0o664, STRANGER), status(stat.S_IFDIR | 0o2775, STRANGER)
    monkeypatch.setattr(os, "getgroups", lambda: [7])
    assert has_trusted_writers(file, folder)
    monkeypatch.setattr(os, "getgroups", lambda: [8])
    assert not has_trusted_writers(file, folder)


def test_why_untrusted_names_the_folder_or_the_file(tmp_path: Path, give_away: Give) -> None:
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    path = folder / "file"
    path.touch(mode=0o600)
    assert why_untrusted(path) == ""
    path.chmod(0o622)
    assert f"{path} with mode 622: another user could write it" in why_untrusted(path)
    path.chmod(0o600)
    folder.chmod(0o777)
    assert f"{folder} with mode 777" in why_untrusted(path)
    folder.chmod(0o700)
    give_away(path)
    assert "another user could write it" in why_untrusted(path)


def test_why_untrusted_link_to_a_file_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "file").touch(mode=0o600)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert "another user could write it" in why_untrusted(tmp_path / "link")


@pytest.mark.parametrize(("mode", "left"), [(0o775, 0o755), (0o777, 0o755), (0o700, 0o700), (0o2777, 0o2755)])
def test_closed_folder_own_folder_loses_the_writers_besides_its_owner(mode: int, left: int, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(mode)
    assert stat.S_IMODE(closed_folder(folder).stat().st_mode) == left


def test_closed_folder_that_a_group_shares_stays(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    os.chown(folder, -1, os.getegid())
    folder.chmod(0o2775)
    assert stat.S_IMODE(closed_folder(folder).stat().st_mode) == 0o2775


@pytest.mark.parametrize("check", [closed_folder, private_folder])
def test_folder_of_another_user_raises(check: Callable[[Path], Path], tmp_path: Path, give_away: Give) -> None:
    folder = check(tmp_path / "folder")
    assert check(folder) == folder
    give_away(folder)
    with pytest.raises(ConfigError, match="belongs to user"):
        check(folder)


def test_private_folder_that_others_could_write_raises_and_one_they_could_read_is_closed(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "folder")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    assert stat.S_IMODE(private_folder(folder).stat().st_mode) == 0o700
    folder.chmod(0o770)
    with pytest.raises(ConfigError, match=r"drwxrwx--- .*could have written files in it; remove it"):
        private_folder(folder)


def test_private_folder_link_raises(tmp_path: Path) -> None:
    private_folder(tmp_path / "folder")
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    with pytest.raises(ConfigError, match="remove it"):
        private_folder(tmp_path / "link")
