"""A file as the host tier: no name, all blocks at once, a clear error (C33)."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from forebay.base.errors import ConfigError
from forebay.pools.host_file import map_over
from forebay.pools.regions import Regions, Tag


def test_host_tier_in_a_file_is_memory_without_a_name(tmp_path: Path) -> None:
    regions = Regions()
    memory = regions.take_tiers(Tag.KV_CACHE, 8192, 10_000, folder=str(tmp_path))
    assert len(memory) == 18_192
    assert not memory.any()
    assert not list(tmp_path.iterdir())
    memory[:] = torch.arange(18_192).to(torch.uint8)
    regions.release(Tag.KV_CACHE)
    assert not memory[:8192].any(), "the device tier was not released"
    assert torch.equal(memory[8192:], torch.arange(8192, 18_192).to(torch.uint8)), "the file lost its bytes"


def test_host_tier_file_has_its_blocks_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate, sizes = os.posix_fallocate, []

    def noted(descriptor: int, offset: int, size: int) -> None:
        allocate(descriptor, offset, size)
        sizes.append((size, os.fstat(descriptor).st_blocks * 512))

    monkeypatch.setattr(os, "posix_fallocate", noted)
    Regions().take_tiers(Tag.KV_CACHE, 4096, 64 << 20, folder=str(tmp_path))
    ((asked, allocated),) = sizes
    assert allocated >= asked == 64 << 20


@pytest.mark.parametrize(
    ("error", "why"),
    [
        *((code, "the KV of a layer takes 4.0 KiB more") for code in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)),
        *((code, "name a folder that can be written to") for code in (errno.EACCES, errno.EROFS)),
    ],
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) else "",
)
def test_host_tier_file_that_cannot_be_made_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, why: str
) -> None:
    def fail(*args: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(ConfigError, match=why):
        map_over(Regions().take(Tag.KV_CACHE, 4096), str(tmp_path))


def test_host_tier_in_a_folder_that_is_missing_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone: No such file or directory"):
        Regions().take_tiers(Tag.KV_CACHE, 4096, 4096, folder=str(tmp_path / "gone"))


def test_host_tier_memory_that_cannot_be_mapped_is_a_clear_error(tmp_path: Path) -> None:
    """mmap returns its failure as the last address, which is negative only as a 32-bit number."""
    with pytest.raises(ConfigError, match=r"Invalid argument"):
        map_over(Regions().take(Tag.KV_CACHE, 3 * 4096)[1:4097], str(tmp_path))


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL], ids=errno.errorcode.get)
def test_host_tier_file_system_without_nameless_files_has_none_with_a_name_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    open_file = os.open

    def refuse(path: str, flags: int, *mode: int, **others: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(code, os.strerror(code))
        return open_file(path, flags, *mode, **others)

    monkeypatch.setattr(os, "open", refuse)
    memory = Regions().take_tiers(Tag.KV_CACHE, 4096, 4096, folder=str(tmp_path))
    memory[:] = 7
    assert not list(tmp_path.iterdir())


def test_host_tier_folder_that_cannot_be_written_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **others: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigError, match=r"Permission denied: name a folder that can be written to"):
        Regions().take_tiers(Tag.KV_CACHE, 4096, 4096, folder=str(tmp_path))
