"""GGUF models in several files: read as one by any part, and parts that do not belong together refused in one line."""

from __future__ import annotations

import random
import shutil
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.base.errors import ModelError
from forebay.cli.main import main
from forebay.engine.lifecycle.model_shape import read_shape
from forebay.engine.lifecycle.weights import weight_paths
from forebay.families.checkpoint import open_checkpoint
from forebay.formats import gguf, gguf_parts
from forebay.formats.gguf import GgufFile
from forebay.formats.gguf_parts import MAX_PARTS, first_parts, model_file, part_names, whole_name
from forebay.formats.store import cached, find_model, short_name
from forebay.formats.stored_tensor import read_tensor
from forebay.text.tokenizer import Tokenizer
from tests.formats.gguf_files import TOKENIZER, llama_metadata, llama_tensors, write_gguf
from tests.formats.hostile import NOT_FILES
from tests.text.tiny_tokenizer import tiny_metadata

MIB = 1 << 20
NAMES = [f"tiny.Q4_0-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
TENSORS = llama_tensors("Q4_0")
METADATA = llama_metadata(vocab_size=32)

Changed = dict[int, dict[str, Any]]
"""By the number of a part: entries of its metadata, None to leave one out."""


def write_parts(folder: Path, changed: Changed | None = None, tensors: dict[int, dict[str, Any]] | None = None) -> Path:
    """Write three parts, the first without tensors as `--no-tensor-first-split` makes it; the first part's path."""
    names = list(TENSORS)
    own = {0: {}, 1: {name: TENSORS[name] for name in names[:6]}, 2: {name: TENSORS[name] for name in names[6:]}}
    own |= tensors or {}
    for number, name in enumerate(NAMES):
        extra: dict[str, Any] = {"general.name": "Tiny", **TOKENIZER} if number == 0 else {}
        extra |= {"split.no": number, "split.count": 3, "split.tensors.count": len(TENSORS)}
        extra |= (changed or {}).get(number, {})
        extra = {key: value for key, value in extra.items() if value is not None}
        write_gguf(folder / name, METADATA if number == 0 else {}, own[number], type_name="Q4_0", extra=extra)
    return folder / NAMES[0]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three parts, whose tensors are `TENSORS`."""
    return write_parts(tmp_path_factory.mktemp("parts")).parent


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "copy"))


@pytest.fixture
def most_memory() -> Iterator[None]:
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 256 * MIB, f"{peak / MIB:.0f} MiB"


def assert_refused(path: Path, message: str) -> None:
    """Every part is refused in one line."""
    for part in gguf_parts.part_paths(path):
        with pytest.raises(ModelError, match=message) as raised:
            open_checkpoint(part)
        assert "\n" not in str(raised.value)
        assert len(str(raised.value)) < 1000


@pytest.mark.parametrize("name", [*NAMES, ""])
def test_open_any_part_or_folder_reads_the_model_of_one_file(name: str, sound: Path, tmp_path: Path) -> None:
    whole = open_checkpoint(write_gguf(tmp_path / "whole.gguf", METADATA, TENSORS, type_name="Q4_0"))
    parts = open_checkpoint(sound / name)
    assert parts.path == sound / NAMES[0]
    assert parts.config == whole.config
    assert parts.num_bytes == whole.num_bytes
    assert set(parts.tensors) == set(whole.tensors)
    for key, tensor in whole.tensors.items():
        np.testing.assert_array_equal(read_tensor(parts.tensors[key]), read_tensor(tensor), err_msg=key)
    assert read_shape(sound / name, False).weights == whole.weight_shapes()


@pytest.mark.parametrize("part_tensors", [1, 4, 10])
def test_open_parts_of_the_gguf_package_reads_all_tensors(part_tensors: int, tmp_path: Path) -> None:
    extra = tiny_metadata(300)
    tensors = {name: data for name, data in TENSORS.items() if name != "token_embd.weight"}
    tensors["token_embd.weight"] = np.ones((300, 256), np.float32)
    path = write_gguf(
        tmp_path / "m.gguf", llama_metadata(), tensors, type_name="Q4_0", extra=extra, part_tensors=part_tensors
    )
    parts = sorted(tmp_path.iterdir())
    assert len(parts) == -(-len(tensors) // part_tensors)
    assert path == parts[0]
    last = GgufFile(parts[-1])
    for name, data in tensors.items():
        np.testing.assert_array_equal(last.raw(name).read().reshape(-1), data.view(np.uint8).reshape(-1), err_msg=name)
    assert Tokenizer.from_path(parts[-1]).encode("hello") == Tokenizer.from_path(tmp_path).encode("hello")


CHANGES: dict[str, tuple[Changed, str]] = {
    "another number": ({1: {"split.no": 2}}, "split.no is 2 and must be 1, that of part 2 of 3 with 11 tensors"),
    "no number": ({2: {"split.no": None}}, "split.no is missing and must be 2"),
    "a text": ({2: {"split.no": "2"}}, "split.no is '2' and must be 2"),
    "a flag": ({1: {"split.no": True}}, "split.no is '?True'? and must be 1"),
    "another count": ({1: {"split.count": 2}}, "split.count is 2 and must be 3"),
    "no count": ({0: {"split.count": None}}, "split.count is missing and must be 3"),
    "a list": ({0: {"split.count": [3, 3]}}, "split.count is .* and must be 3"),
    "more tensors": ({0: {"split.tensors.count": 12}}, "split.tensors.count is 12 and must be 11"),
    "another name": (
        {2: {"general.name": "Other"}},
        "general.name is 'Other', and that of .* 'Tiny', .*different models",
    ),
    "a name of numbers": ({2: {"general.name": [1, 2]}}, "different models"),
    "another architecture": (
        {2: {"general.architecture": "qwen3"}},
        "general.architecture is 'qwen3'.*different models",
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_open_part_of_another_model_is_refused(kind: str, tmp_path: Path, most_memory: None) -> None:
    changed, message = CHANGES[kind]
    assert_refused(write_parts(tmp_path, changed), message)


def _missing(folder: Path) -> None:
    (folder / NAMES[1]).unlink()


def _duplicated(folder: Path) -> None:
    shutil.copyfile(folder / NAMES[1], folder / NAMES[2])


def _swapped(folder: Path) -> None:
    (folder / NAMES[2]).rename(folder / "kept")
    (folder / NAMES[1]).rename(folder / NAMES[2])
    (folder / "kept").rename(folder / NAMES[1])


def _truncated(folder: Path) -> None:
    data = (folder / NAMES[2]).read_bytes()
    (folder / NAMES[2]).write_bytes(data[:-40])


def _whole(folder: Path) -> None:
    write_gguf(folder / NAMES[1], METADATA, TENSORS, type_name="Q4_0")


def _dangling(folder: Path) -> None:
    (folder / NAMES[1]).unlink()
    (folder / NAMES[1]).symlink_to("/nowhere")


ACTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (_missing, r"1 of the 3 parts of the model are missing \(tiny.Q4_0-00002-of-00003"),
    "a link to nothing": (_dangling, r"1 of the 3 parts of the model are missing"),
    "duplicated": (_duplicated, "split.(no|tensors.count) is"),
    "swapped": (_swapped, "split.no is 2 and must be 1"),
    "truncated": (_truncated, "is the download complete"),
    "a whole model": (_whole, "split|as well"),
}


@pytest.mark.parametrize("kind", ACTS)
def test_open_wrong_set_of_parts_is_refused(kind: str, folder: Path, most_memory: None) -> None:
    act, message = ACTS[kind]
    act(folder)
    assert_refused(folder / NAMES[0], message)


@pytest.mark.parametrize("kind", NOT_FILES)
def test_open_part_that_is_no_file_is_refused(kind: str, folder: Path, most_memory: None) -> None:
    (folder / NAMES[1]).unlink()
    NOT_FILES[kind](folder / NAMES[1])
    assert_refused(folder / NAMES[0], "tiny.Q4_0-0000")


def test_open_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    first = {"output_norm.weight": TENSORS["output_norm.weight"]}
    path = write_parts(tmp_path, {n: {"split.tensors.count": 12} for n in range(3)}, {0: first})
    assert_refused(path, "'output_norm.weight' is in tiny.Q4_0-00001-of-00003.gguf as well")


def test_open_part_under_another_name_is_refused(folder: Path) -> None:
    (folder / NAMES[0]).rename(folder / "renamed.gguf")
    with pytest.raises(ModelError, match=r"one of 3 parts of a model.*its name does not end"):
        open_checkpoint(folder / "renamed.gguf")


@pytest.mark.parametrize("value", ["3", [1, 2], 2.0])
def test_open_single_file_with_wrong_split_count_is_refused(value: Any, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", METADATA, TENSORS, type_name="Q4_0", extra={"split.count": value})
    with pytest.raises(ModelError, match="parts of a model"):
        open_checkpoint(path)


def test_open_single_part_of_one_is_read(tmp_path: Path) -> None:
    extra = {"split.no": 0, "split.count": 1, "split.tensors.count": 11}
    path = write_gguf(tmp_path / "m-00001-of-00001.gguf", METADATA, TENSORS, type_name="Q4_0", extra=extra)
    assert len(GgufFile(path).tensors) == len(TENSORS)


def test_open_too_many_parts_is_refused_before_any_is_looked_for(tmp_path: Path, most_memory: None) -> None:
    name = "m-00001-of-99999.gguf"
    (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=f"one of 99999 parts; at most {MAX_PARTS}"):
        open_checkpoint(tmp_path / name)


def test_listing_models_a_part_of_too_many_is_one_of_them(tmp_path: Path) -> None:
    files = [tmp_path / "m-00002-of-99999.gguf", tmp_path / "a.gguf", tmp_path / NAMES[1], tmp_path / NAMES[2]]
    assert first_parts(files) == [tmp_path / name for name in ("a.gguf", "m-00002-of-99999.gguf", NAMES[1])]


def _preamble(num_tensors: int, num_entries: int) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", 3, num_tensors, num_entries)


def _strings(count: int) -> bytes:
    return struct.pack("<Q1sIIQ", 1, b"x", 9, 8, count) + bytes(8 * count)


def _bytes(count: int) -> bytes:
    return struct.pack("<Q1sIIQ", 1, b"x", 9, 0, count)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("data", "size", "message"),
    [
        (_preamble(0, 1) + _strings(6_000), 0, "more than 15000 strings"),
        (_preamble(0, 1) + _bytes(30 * MIB), 32 * MIB, "are left"),
        (_preamble(0, 2000) + b"".join(struct.pack("<Q5sIB", 5, b"%05d" % i, 0, 1) for i in range(2000)), 0, "at most"),
        (_preamble(30_000, 0), 32 * MIB, "not a sound GGUF file"),
    ],
)
def test_open_limits_hold_for_all_parts_together(
    data: bytes, size: int, message: str, tmp_path: Path, most_memory: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part alone is within them."""
    monkeypatch.setattr(gguf, "MAX_STRINGS", gguf.MAX_STRINGS // 100)
    for name in NAMES:
        with (tmp_path / name).open("wb") as file:
            file.write(data)
            file.truncate(max(size, len(data)))
    assert_refused(tmp_path / NAMES[0], message)


@pytest.mark.quick(1)
@pytest.mark.parametrize("part", range(3))
def test_open_randomly_damaged_parts_are_refused_or_read(part: int, folder: Path, most_memory: None) -> None:
    rng, path = random.Random(part), folder / NAMES[part]
    original = path.read_bytes()
    header = min([tensor.offset for tensor in gguf_part_tensors(path)] or [len(original)])
    for _ in range(200):
        data = bytearray(original)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(header)] = rng.randrange(256)
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        path.write_bytes(data)
        try:
            checkpoint = open_checkpoint(folder)
        except ModelError as error:
            assert "\n" not in str(error)  # noqa: PT017
            continue
        assert checkpoint.config.num_layers >= 1


def gguf_part_tensors(path: Path) -> list[Any]:
    model = GgufFile(path)
    return [model.tensors[name] for name, file in model._files.items() if file.path == path]


@pytest.mark.parametrize(
    ("name", "names", "whole"),
    [
        ("m.gguf", ["m.gguf"], "m.gguf"),
        ("a/m-00002-of-00002.gguf", ["a/m-00001-of-00002.gguf", "a/m-00002-of-00002.gguf"], "a/m.gguf"),
        ("m-00000-of-00002.gguf", ["m-00000-of-00002.gguf"], "m.gguf"),
        ("m-00003-of-00002.gguf", ["m-00003-of-00002.gguf"], "m.gguf"),
        ("m-1-of-2.gguf", ["m-1-of-2.gguf"], "m-1-of-2.gguf"),
        ("m-00001-of-00002.safetensors", ["m-00001-of-00002.safetensors"], "m-00001-of-00002.safetensors"),
    ],
)
def test_part_names_are_all_of_one_model(name: str, names: list[str], whole: str) -> None:
    assert part_names(name) == names
    assert whole_name(name) == whole


def test_model_file_of_a_folder_is_its_only_gguf_model(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    (folder / "mmproj-F16.gguf").write_bytes(b"x")
    assert model_file(folder) == folder / NAMES[0]
    (folder / "other.gguf").write_bytes(b"x")
    assert model_file(folder) == folder
    (folder / "other.gguf").unlink()
    (folder / "model.safetensors").write_bytes(b"x")
    assert model_file(folder) == folder


def test_store_counts_parts_as_one_model(sound: Path) -> None:
    assert first_parts(sound.iterdir()) == cached(sound) == [sound / NAMES[0]]
    assert short_name(sound / NAMES[0]) == "tiny"
    for name in ("tiny", NAMES[0], str(sound), str(sound / NAMES[2])):
        assert find_model(name, sound) == sound / NAMES[0]


@pytest.mark.parametrize("missing", [None, 0, 1])
def test_models_list_and_rm_handle_all_parts(
    missing: int | None,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    models = tmp_path / "cache" / "forebay" / "models"
    models.parent.mkdir(parents=True)
    folder.rename(models)
    if missing is not None:
        (models / NAMES[missing]).unlink()
    sizes = sum(path.stat().st_size for path in models.iterdir())
    assert main(["models", "list", "--json"]) == 0
    listed = capsys.readouterr().out
    assert listed.count('"name": "tiny"') == 1
    assert f'"num_bytes": {sizes},' in listed
    assert main(["models", "rm", "tiny"]) == 0
    assert list(models.iterdir()) == []


def test_inspect_and_plan_show_all_parts(sound: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "inspect", str(sound / NAMES[1])]) == 0
    assert "8 x Q4_0, 3 x F32" in capsys.readouterr().out
    assert main(["plan", str(sound), "--quantization", "file", "--dtype", "float32"]) == 0
    printed = capsys.readouterr().out
    assert "weights: 220.5 KiB in codes of 4 bits (4.50 each with scales), 3.0 KiB in numbers of 32 bits" in printed


def test_weight_paths_are_all_parts_of_a_model(sound: Path) -> None:
    """A part that changes while the engine sleeps is noticed."""
    for path in (sound, sound / NAMES[2]):
        assert weight_paths(path) == [sound / name for name in NAMES]
