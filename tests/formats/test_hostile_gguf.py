"""GGUF metadata of wrong types and of any size end in one typed line, before anything large is made of them."""

from __future__ import annotations

import contextlib
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.base.errors import ModelError
from forebay.families.base.gguf_names import architectures
from forebay.families.checkpoint import open_checkpoint
from forebay.families.config.model_config import config_from_gguf
from forebay.formats.gguf import MAX_STRINGS, MAX_TENSORS, GgufFile
from forebay.formats.strings import Strings
from forebay.text.tokenizer import Tokenizer
from tests.formats.gguf_files import llama_metadata, llama_tensors, write_gguf
from tests.formats.hostile import NOT_FILES
from tests.text.tiny_tokenizer import tiny_metadata

# As the reader hands values on: whole numbers, floats, flags, texts, lists of texts, arrays of numbers.
WRONG: list[Any] = [-1, 0, 3, 2**63, 2.5, float("nan"), True, False, "", "x"]
WRONG += [Strings.of(texts) for texts in ([], ["x"], [""] * 300)]
WRONG += [np.zeros(n, dtype) for n in (0, 1, 300) for dtype in (np.float32, np.uint8, np.bool_)]


def sentencepiece_metadata() -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", "▁", "a", "▁a", *(f"<0x{byte:02X}>" for byte in range(256))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": Strings.of(tokens),
        "tokenizer.ggml.scores": np.linspace(0, -1, len(tokens)),
        "tokenizer.ggml.token_type": np.array([2, 3, 3, 1, 1, 1, *[6] * 256]),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": True,
    }


def byte_level_metadata() -> dict[str, Any]:
    metadata = tiny_metadata(300)
    return {**metadata, "tokenizer.ggml.token_type": np.array(metadata["tokenizer.ggml.token_type"])}


def read_tokenizer(metadata: dict[str, Any]) -> None:
    try:
        Tokenizer.from_gguf(metadata).encode("hello a")
    except ModelError as error:
        assert "\n" not in str(error)  # noqa: PT017


@pytest.mark.parametrize("sound", [byte_level_metadata(), sentencepiece_metadata()], ids=["bytes", "sentencepiece"])
def test_a_tokenizer_of_wrong_types_is_refused_or_read(sound):
    assert Tokenizer.from_gguf(sound).encode("a")
    for name in sound:
        read_tokenizer({key: value for key, value in sound.items() if key != name})
        for value in WRONG:
            read_tokenizer({**sound, name: value})


def test_a_configuration_of_wrong_types_is_refused_or_read(tmp_path):
    file = GgufFile(write_gguf(tmp_path / "m.gguf", llama_metadata(), llama_tensors("F32")))
    sound = {**file.metadata, "tokenizer.ggml.eos_token_id": 2, "split.count": 1, "general.alignment": 32}
    outcomes = []
    for name in sound:
        for value in WRONG:
            file.metadata = {**sound, name: value}
            try:
                outcomes.append(config_from_gguf(file).num_layers > 0)
            except ModelError as error:
                outcomes.append("\n" in str(error) and name)
    assert set(outcomes) == {True, False}


@pytest.mark.parametrize("name", [name for name, _, _ in architectures()])
def test_no_metadata_of_any_architecture_are_more_than_refused(name, tmp_path):
    architecture = next(found for stored, _, found in architectures() if stored == name)
    own = {**llama_metadata(), "attention.key_length": 16, "rope.dimension_count": 16}
    file = GgufFile(write_gguf(tmp_path / "m.gguf", own, llama_tensors("F32"), architecture=name))
    sound = file.metadata
    for key in {*own, *architecture.keys, *architecture.checked}:
        for value in [*WRONG, np.array([1, 2])]:
            file.metadata = {**sound, f"{name}.{key}": value}
            with contextlib.suppress(ModelError):
                config_from_gguf(file)


@pytest.mark.parametrize("kind", NOT_FILES)
def test_what_is_no_file_is_refused_by_its_name(kind, tmp_path):
    NOT_FILES[kind](tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=r"m\.gguf"):
        open_checkpoint(tmp_path / "m.gguf")


def _preamble(num_tensors: int, num_entries: int) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", 3, num_tensors, num_entries)


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _strings(count: int, name: bytes = b"x") -> bytes:
    return _string(name) + struct.pack("<IIQ", 9, 8, count)


def _write_sparse(path: Path, data: bytes, size: int) -> Path:
    with path.open("wb") as file:
        file.write(data)
        file.truncate(size)
    return path


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (_preamble(400_000, 0), f"at most {MAX_TENSORS}"),
        (_preamble(2**63, 0), f"at most {MAX_TENSORS}"),
        (_preamble(0, 400_000), "400000 entries"),
        (_preamble(0, 1) + _strings(2**24), "are left"),
        (_preamble(0, 1) + _strings(MAX_STRINGS + 1), f"more than {MAX_STRINGS} strings"),
        (_preamble(0, 1) + _string(b"x") + struct.pack("<IQ", 8, 2**33), "are left"),  # a text of 8 GiB
        (_preamble(0, 1) + _string(b"x") + struct.pack("<IIQ", 9, 0, 2**33), "are left"),  # as many bytes
        (_preamble(0, 1) + _string(b"x") + struct.pack("<IIQ", 9, 9, 2**20), "value type"),  # lists of lists
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_large_counts_are_refused_before_they_cost_anything(data, message, tmp_path):
    path = _write_sparse(tmp_path / "m.gguf", data, 1 << 30)
    tracemalloc.start()
    with pytest.raises(ModelError, match=message):
        GgufFile(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20


def test_strings_are_counted_over_all_lists(tmp_path, monkeypatch):
    monkeypatch.setattr("forebay.formats.gguf.MAX_STRINGS", 100)
    data = _preamble(0, 2) + _strings(50, b"a") + bytes(400)
    enough = GgufFile(_write_sparse(tmp_path / "enough.gguf", data + _strings(50, b"b"), 4096))
    assert enough.metadata == {"a": [""] * 50, "b": [""] * 50}
    with pytest.raises(ModelError, match="more than 100 strings"):
        GgufFile(_write_sparse(tmp_path / "more.gguf", data + _strings(51, b"b"), 4096))
