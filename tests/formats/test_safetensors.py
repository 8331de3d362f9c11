"""Safetensors folders: single, sharded, and every kind of unsound file refused."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors.torch import save, save_file

from forebay.base.errors import ModelError
from forebay.families.checkpoint import open_checkpoint
from forebay.formats.safetensors import INDEX_NAME, SINGLE_NAME, SafetensorsFile
from forebay.formats.stored_tensor import read_tensor
from tests.families.test_model_config import llama_json

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b": torch.arange(6).to(torch.bfloat16).view(2, 3) / 7,
    "c": torch.arange(5).half() / 3,
}


def write_folder(folder, tensors=TENSORS, **config):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(llama_json(**config)))
    save_file(tensors, folder / SINGLE_NAME)
    return folder


def test_values_of_each_type_are_read_exactly(tmp_path):
    checkpoint = open_checkpoint(write_folder(tmp_path))
    assert set(checkpoint.tensors) == set(TENSORS)
    for name, expected in TENSORS.items():
        assert torch.equal(torch.from_numpy(read_tensor(checkpoint.tensors[name])), expected.float())
    assert checkpoint.gguf_metadata == {}
    assert checkpoint.num_bytes == 12 * 4 + 6 * 2 + 5 * 2


def test_types_that_are_not_weights_are_refused_when_read(tmp_path):
    checkpoint = open_checkpoint(write_folder(tmp_path, {"ids": torch.arange(3)}))
    with pytest.raises(ModelError, match=r"ids.*I64"):
        read_tensor(checkpoint.tensors["ids"])


def write_shards(folder, **weight_map):
    write_folder(folder)
    (folder / SINGLE_NAME).rename(folder / "x.safetensors")
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_shards_are_found_through_the_index(tmp_path):
    checkpoint = open_checkpoint(write_shards(tmp_path, a="x.safetensors", b="x.safetensors", c="x.safetensors"))
    assert set(checkpoint.tensors) == set(TENSORS)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "x.bin", "", 7, None, ["x.safetensors"]])
def test_an_index_can_only_name_safetensors_files_of_its_folder(name, tmp_path):
    with pytest.raises(ModelError, match="plain name"):
        open_checkpoint(write_shards(tmp_path, a=name))


def test_a_missing_shard_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"y\.safetensors"):
        open_checkpoint(write_shards(tmp_path, a="x.safetensors", b="y.safetensors"))


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    folder = write_shards(tmp_path, a="x.safetensors", b="y.safetensors")
    (folder / "y.safetensors").write_bytes((folder / "x.safetensors").read_bytes())
    with pytest.raises(ModelError, match="another file"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.pth", "model.ckpt"])
def test_pickled_weights_are_never_opened(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(llama_json()))
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match=rf"pickled \({name}\).*never opened"):
        open_checkpoint(tmp_path)


def test_folders_without_weights_say_what_is_missing(tmp_path):
    with pytest.raises(ModelError, match="download complete"):
        open_checkpoint(tmp_path)
    (tmp_path / "m.gguf").touch()
    with pytest.raises(ModelError, match=r"m\.gguf: cannot be read \(it is empty\)"):
        open_checkpoint(tmp_path)
    (tmp_path / "other.gguf").touch()
    with pytest.raises(ModelError, match=r"name it itself: .*m\.gguf"):
        open_checkpoint(tmp_path)
    with pytest.raises(ModelError, match="no such file"):
        open_checkpoint(tmp_path / "absent")
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelError, match=r"model\.bin: only \.gguf files and folders"):
        open_checkpoint(tmp_path / "model.bin")


def _file(tmp_path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / SINGLE_NAME
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


F32_PAIR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b'{"a"',
        b"[" * 200_000,
        b"\xff\xfe{}",
        {"a": 1},
        {"a": {}},
        {"a": F32_PAIR | {"dtype": "F31"}},
        {"a": F32_PAIR | {"dtype": ["F32"]}},
        {"a": F32_PAIR | {"shape": [-2]}},
        {"a": F32_PAIR | {"shape": [2**62, 4]}},
        {"a": F32_PAIR | {"shape": [2.0]}},
        {"a": F32_PAIR | {"shape": [1] * 100 + [2]}},
        {"a": F32_PAIR | {"shape": 2}},
        {"a": F32_PAIR | {"data_offsets": [0]}},
        {"a": F32_PAIR | {"data_offsets": [8, 0]}},
        {"a": F32_PAIR | {"data_offsets": [4, 12]}},
        {"a": F32_PAIR | {"data_offsets": [0, 2**70]}},
        {"a": F32_PAIR, "b": F32_PAIR},
        {"a": F32_PAIR | {"shape": [1], "data_offsets": [0, 4]}},
        {"a": F32_PAIR, "b": F32_PAIR | {"data_offsets": [8, 16]}},
    ],
    ids=lambda header: str(header)[:60],
)
def test_unsound_headers_are_refused(header, tmp_path):
    with pytest.raises(ModelError, match=SINGLE_NAME):
        SafetensorsFile(_file(tmp_path, header, bytes(8)))


@pytest.mark.parametrize("length", [0, 1, 7, 8])
def test_files_shorter_than_their_header_are_refused(length, tmp_path):
    path = tmp_path / SINGLE_NAME
    path.write_bytes(b"\xff" * length)
    with pytest.raises(ModelError, match=SINGLE_NAME):
        SafetensorsFile(path)


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", range(2))
def test_randomly_damaged_files_are_refused_or_read_but_never_crash(seed, tmp_path):
    rng, original = random.Random(seed), save(TENSORS)
    header = 8 + int.from_bytes(original[:8], "little")
    path = tmp_path / SINGLE_NAME
    for _ in range(1000):
        data = bytearray(original)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(header)] = rng.choice([rng.randrange(256), *b'0123456789[]{},:"'])
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        path.write_bytes(data)
        try:
            file = SafetensorsFile(path)
            for name in file.tensors:
                file.values(name).read()
        except ModelError:
            continue
