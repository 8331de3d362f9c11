"""Files of the weights cache: whole or absent, bounded, and rejected with the reason if they are not as written."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.base import fault
from forebay.formats import weights_cache
from forebay.formats.weights_cache import Key, Unusable, open_cached, path_of, write

KEY = {"checkpoint": "a", "kernels": "native-avx2"}
PIECES = [bytes(range(200)), b"", b"x" * 64, b"last"]
LIMIT = 1 << 20


def written(folder: Path, key: Key = KEY, pieces: list[bytes] = PIECES, limit_bytes: int = LIMIT) -> Path:
    views = [memoryview(piece) for piece in pieces]
    return write(folder, key, views, limit_bytes=limit_bytes, progress=lambda done, total: None)


def content(folder: Path, key: Key = KEY) -> list[bytes] | None:
    """The pieces, checked."""
    file = open_cached(folder, key)
    if file is None:
        return None
    try:
        whole = os.pread(file.descriptor, file.num_bytes + 1, 0)
    finally:
        os.close(file.descriptor)
    assert len(whole) == file.num_bytes
    file.check_contents(memoryview(whole))
    return [whole[span] for span in file.spans()]


def test_write_pieces_come_back_each_on_a_line(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "weights"
    assert open_cached(folder, KEY) is None
    path = written(folder)
    assert content(folder) == PIECES
    file = open_cached(folder, KEY)
    assert file is not None
    assert [span.start % 64 for span in file.spans()] == [0] * len(PIECES)
    os.close(file.descriptor)
    assert path.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [entry.name for entry in folder.iterdir()] == [path.name]


def test_open_cached_other_key_finds_nothing(tmp_path: Path) -> None:
    written(tmp_path)
    for name in KEY:
        assert content(tmp_path, {**KEY, name: "other"}) is None


def test_open_cached_file_of_another_key_is_rejected_by_name(tmp_path: Path) -> None:
    other = {**KEY, "kernels": "native-amx"}
    os.rename(written(tmp_path, other), path_of(tmp_path, KEY))
    with pytest.raises(Unusable, match="written for others: kernels differ"):
        open_cached(tmp_path, KEY)


@pytest.mark.parametrize("size", [0, 15, 39, 41, 300, -64, -1])
def test_open_cached_truncated_file_is_rejected(size: int, tmp_path: Path) -> None:
    path = written(tmp_path)
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    with pytest.raises(Unusable):
        open_cached(tmp_path, KEY)


def test_open_cached_longer_file_is_rejected(tmp_path: Path) -> None:
    path = written(tmp_path)
    os.truncate(path, path.stat().st_size + 64)
    with pytest.raises(Unusable, match="not what its header names"):
        open_cached(tmp_path, KEY)


def test_open_cached_any_changed_byte_of_the_header_is_rejected(tmp_path: Path) -> None:
    path = written(tmp_path)
    whole = path.read_bytes()
    end = whole.index(b"\0\0\0\0", 40)
    for at in range(end):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(Unusable):
            open_cached(tmp_path, KEY)


def test_open_cached_huge_header_is_rejected_before_it_is_read(tmp_path: Path) -> None:
    path = written(tmp_path)
    whole = bytearray(path.read_bytes())
    whole[32:40] = (1 << 62).to_bytes(8, "little")
    path.write_bytes(whole)
    with pytest.raises(Unusable, match="its header would have 4611686018427387904 bytes"):
        open_cached(tmp_path, KEY)


def test_open_cached_file_that_others_can_write_is_rejected(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.chmod(0o620)
    with pytest.raises(Unusable, match="another could write it"):
        open_cached(tmp_path, KEY)


def test_open_cached_link_or_folder_is_rejected(tmp_path: Path) -> None:
    path = written(tmp_path)
    os.rename(path, tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Unusable, match="cannot be opened"):
        open_cached(tmp_path, KEY)
    path.unlink()
    path.mkdir(mode=0o700)
    with pytest.raises(Unusable, match="cannot be read"):
        open_cached(tmp_path, KEY)


@pytest.mark.parametrize("piece", [0, 2, 3])
def test_check_contents_changed_byte_names_the_piece(piece: int, tmp_path: Path) -> None:
    path = written(tmp_path)
    whole = bytearray(path.read_bytes())
    file = open_cached(tmp_path, KEY)
    assert file is not None
    os.close(file.descriptor)
    whole[list(file.spans())[piece].stop - 1] ^= 1
    path.write_bytes(whole)
    with pytest.raises(Unusable, match=f"piece {piece} of 4 is damaged"):
        content(tmp_path)


def test_write_beyond_the_limit_writes_and_removes_nothing(tmp_path: Path) -> None:
    first = written(tmp_path)
    with pytest.raises(Unusable, match="--weights-cache-bytes allows"):
        written(tmp_path, {"checkpoint": "large"}, [bytes(5000)], limit_bytes=8000)
    assert list(tmp_path.iterdir()) == [first]


def test_write_full_cache_removes_the_least_recently_used(tmp_path: Path) -> None:
    keys = [{"checkpoint": str(i)} for i in range(3)]
    paths = [written(tmp_path, key, [bytes(1000)]) for key in keys]
    size = paths[0].stat().st_size
    for age, path in enumerate(reversed(paths)):
        os.utime(path, (1000 - age, 1000 - age))
    assert content(tmp_path, keys[0]) is not None  # the oldest, used again
    written(tmp_path, {"checkpoint": "3"}, [bytes(1000)], limit_bytes=3 * size)
    assert [path.exists() for path in paths] == [True, False, True]
    written(tmp_path, keys[0], [bytes(1000)], limit_bytes=3 * size)  # takes the place of its own file
    assert [path.exists() for path in paths] == [True, False, True]


def test_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = written(tmp_path)
    before = path.read_bytes()
    fault.arm("weights_cache.write", "os", at=2)
    try:
        with pytest.raises(OSError, match="weights_cache"):
            written(tmp_path, KEY, [b"other"] * 3)
    finally:
        fault.disarm()
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == before


def test_write_removes_what_a_killed_writer_left_and_spares_a_writer_that_lives(tmp_path: Path) -> None:
    left, lives, begins = (tmp_path / f".writing-{name}" for name in ("a-1", "b-2", "c-3"))
    for path in (left, lives, begins):
        path.write_bytes(b"half")
    for path in (left, lives):
        os.utime(path, (1, 1))
    with lives.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        written(tmp_path)
        assert (left.exists(), lives.exists(), begins.exists()) == (False, True, True)


def test_write_mapped_file_keeps_its_bytes_after_it_was_replaced(tmp_path: Path) -> None:
    written(tmp_path)
    file = open_cached(tmp_path, KEY)
    assert file is not None
    written(tmp_path, KEY, [b"other"])
    whole = os.pread(file.descriptor, file.num_bytes, 0)
    os.close(file.descriptor)
    assert [whole[span] for span in file.spans()] == PIECES
    assert content(tmp_path) == [b"other"]


_WRITER = """
import sys
from pathlib import Path
from forebay.formats.weights_cache import write
for i in range(50):
    pieces = [memoryview(bytes([7]) * (100 << 10))] * 3
    write(Path(sys.argv[1]), {"checkpoint": "a"}, pieces, limit_bytes=1 << 20, progress=lambda done, total: None)
"""


def test_write_two_processes_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    writers = [subprocess.Popen([sys.executable, "-c", _WRITER, str(tmp_path)]) for _ in range(2)]
    seen = 0
    while any(writer.poll() is None for writer in writers):
        if (found := content(tmp_path, {"checkpoint": "a"})) is not None:
            assert found == [bytes([7]) * (100 << 10)] * 3
            seen += 1
    assert [writer.returncode for writer in writers] == [0, 0]
    assert seen
    assert [path.suffix for path in tmp_path.iterdir()] == [weights_cache.SUFFIX]


@pytest.mark.parametrize(
    ("folder_mode", "mode", "accepted"),
    [
        (0o2770, 0o660, True),  # as Kubernetes' fsGroup sets both
        (0o2775, 0o664, True),
        (0o2770, 0o662, False),  # any user could write the file
        (0o2777, 0o660, False),  # any user could write the folder
        (0o770, 0o660, False),  # no folder that a group shares
        (0o2750, 0o660, False),
        (0o700, 0o600, True),
    ],
)
def test_open_cached_file_that_a_group_may_write_needs_a_folder_that_the_group_shares(
    folder_mode: int, mode: int, accepted: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "weights"
    path = written(folder)
    path.chmod(mode)
    folder.chmod(folder_mode)
    if accepted:
        assert content(folder) == PIECES
    else:
        with pytest.raises(Unusable, match="another could write it"):
            open_cached(folder, KEY)
