"""`forebay cache`: the files of a prefix cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash

from forebay.base.errors import ConfigError, ModelError
from forebay.cli.cache import run
from forebay.formats import prefix_files
from forebay.formats.prefix_files import Record, Rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    writer = prefix_files.Writer(tmp_path, {"weights": "abc", "kernels": "native", "dtype": "float32"})
    rows = [b"one!", b"two!"]
    kinds = {"kv": Rows([1, 2], 4, [xxhash.xxh3_64_intdigest(row) for row in rows])}
    writer.append(Record("/n", "", b"\0" * 32, 0, kinds), [memoryview(b"".join(rows))])
    behind = {"kv": Rows([3], 4, kinds["kv"].sums[:1])}
    writer.append(Record("/n", "", b"\0" * 48, 2, behind), [memoryview(rows[0])])
    writer.close()
    return tmp_path


def test_cache_list_names_segments_and_their_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", str(folder)]) == 0
    told = capsys.readouterr().out
    assert "000001.prefixes" in told
    assert "2 records, KV of 12 tokens" in told
    assert "weights abc, native, float32" in told


def test_cache_verify_finds_a_damaged_row_and_a_tail(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", str(folder)]) == 0
    (path,) = prefix_files.paths(folder)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + b"?" + b"tail")
    assert run(["verify", str(folder)]) == 1
    told = capsys.readouterr().out
    assert "3 rows, 0 damaged" in told
    assert "row 0 of kv at byte" in told
    assert "4 B are not used" in told


@pytest.mark.parametrize(("part", "status"), [("magic", 1), ("identity", 1), ("header", 1), ("cut", 0), ("begun", 0)])
def test_cache_verify_fails_for_damage_and_not_for_what_a_killed_writer_leaves(
    folder: Path, capsys: pytest.CaptureFixture[str], part: str, status: int
) -> None:
    (path,) = prefix_files.paths(folder)
    segment, _ = prefix_files.open_segment(path)
    prefix_files.os.close(segment.descriptor)
    places = {"magic": 0, "identity": segment.first - 1, "header": segment.first + 30}
    data = bytearray(path.read_bytes())
    if part in places:
        data[places[part]] ^= 1
    path.write_bytes(data[: {"cut": len(data) - 1, "begun": 9}.get(part)])
    assert run(["verify", str(folder)]) == status
    assert path.name in capsys.readouterr().out


def test_cache_rm_removes_segments_unless_a_server_writes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = prefix_files.lock(folder)
    assert lock is not None
    with pytest.raises(ModelError, match="stop it first"):
        run(["rm", str(folder)])
    prefix_files.os.close(lock)
    assert run(["rm", str(folder)]) == 0
    assert "removed 1 files" in capsys.readouterr().out
    assert not prefix_files.paths(folder)


@pytest.mark.parametrize("words", [["fly"], ["list"], ["list", "/there/is/no/such"], []])
def test_cache_without_an_action_or_a_folder_says_what_to_give(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"use list, verify, rm|is no folder"):
        run(words)
