"""What `forebay models quantize` writes is served with the bits of `--quantization` on the original, for every type."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forebay import models
from forebay.backends import make_ops
from forebay.base.errors import ModelError
from forebay.engine.lifecycle.model_shape import read_shape
from forebay.families import TYPES
from forebay.families.checkpoint import open_checkpoint
from forebay.families.config.model_config import config_from_folder
from forebay.families.small import small_config
from forebay.formats.quantization import Quantization
from forebay.formats.quantize import quantize_into
from forebay.formats.safetensors import INDEX_NAME, SINGLE_NAME
from forebay.formats.weight_shapes import ValueBytes
from forebay.models import quantized_copy
from forebay.models.quantized_copy import write_quantized
from forebay.models.random_weights import write_random_weights
from tests.kernels import NATIVE
from tests.models.drive import Driver
from tests.models.tiny import by_tier

INT4, INT8, FILE = Quantization.INT4, Quantization.INT8, Quantization.FILE
IDS = [5, 9, 13, 17, 21, 90, 80, 70, 3]


def make(folder: Path, model_type: str = "llama", dtype: str = "bfloat16", **fields: Any) -> Path:
    """A random checkpoint with names and stacks as other engines have them."""
    folder.mkdir()
    config = {**small_config(model_type, hidden_size=128, num_layers=4, vocab_size=96), "dtype": dtype, **fields}
    (folder / "config.json").write_text(json.dumps(config))
    kind: dict[str, Any] = {"dtype": dtype, "seed": 3}
    write_random_weights(config_from_folder(folder), folder / SINGLE_NAME, **kind, progress=lambda done, total: None)
    return folder


def copy(source: Path, folder: Path, quantization: Quantization = INT4) -> Path:
    folder.mkdir()
    write_quantized(open_checkpoint(source), folder, quantization, quantize_into, lambda done, total: None)
    return folder


def load(path: Path, quantization: Quantization) -> models.Model:
    ops = make_ops(NATIVE, 2)
    return models.load(open_checkpoint(path), ops=ops, dtype=torch.float32, quantization=quantization)


def logits(model: models.Model) -> torch.Tensor:
    (found,) = Driver(model).step([(1, IDS)])
    return found


@pytest.mark.quick(1)
@pytest.mark.parametrize("model_type", by_tier(TYPES))
def test_copy_of_every_type_gives_the_bits_of_the_original_quantized(model_type: str, tmp_path: Path) -> None:
    source = make(tmp_path / "source", model_type)
    for quantization in (INT4, INT8):
        made = copy(source, tmp_path / quantization, quantization)
        right, found = load(source, quantization), load(made, FILE)
        assert found.held_bytes == right.held_bytes
        assert "8 bits" in right.held_bytes
        assert torch.equal(logits(found), logits(right))
        weights = read_shape(made, False).weights
        assert weights.held_bytes(FILE, ValueBytes(own=4, bfloat16=2)) == sum(right.held_bytes.values())


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_copy_of_other_dtypes_gives_the_bits_of_the_original_quantized(dtype: str, tmp_path: Path) -> None:
    source = make(tmp_path / "source", "qwen3_moe", dtype)
    assert torch.equal(logits(load(copy(source, tmp_path / "made"), FILE)), logits(load(source, INT4)))


def test_copy_in_several_files_is_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make(tmp_path / "source")
    whole = logits(load(copy(source, tmp_path / "one"), FILE))
    monkeypatch.setattr(quantized_copy, "_MOST_TENSORS", 7)
    made = copy(source, tmp_path / "several")
    assert len(list(made.glob("model-0000?-of-*.safetensors"))) > 2
    assert (made / INDEX_NAME).is_file()
    assert torch.equal(logits(load(made, FILE)), whole)


def test_copy_brings_tokenizer_and_template_and_no_other_weights(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    for name in ("tokenizer.json", "chat_template.jinja", "pytorch_model.bin", "x.safetensors", INDEX_NAME):
        (source / name).write_text("{}")
    (source / INDEX_NAME).write_text(json.dumps({"weight_map": {"x": SINGLE_NAME}}))
    names = {path.name for path in copy(source, tmp_path / "made").iterdir()}
    assert names == {"config.json", SINGLE_NAME, "tokenizer.json", "chat_template.jinja"}


def test_copy_of_codes_that_quantization_keeps_is_refused_by_name(tmp_path: Path) -> None:
    made = copy(make(tmp_path / "source"), tmp_path / "made")
    with pytest.raises(ModelError, match=r"model\.embed_tokens\.weight is in codes already \(Q8_0\)"):
        copy(made, tmp_path / "again")


def test_copy_of_weights_beyond_float16_is_refused_by_name(tmp_path: Path) -> None:
    source = make(tmp_path / "source", dtype="float32")
    whole = bytearray((source / SINGLE_NAME).read_bytes())
    begin = 8 + int.from_bytes(whole[:8], "little")
    whole[begin : begin + 4] = np.float32(1e9).tobytes()
    (source / SINGLE_NAME).write_bytes(whole)
    with pytest.raises(ModelError, match=r"source: .*weight_q8_0: .* beyond float16"):
        copy(source, tmp_path / "made", INT8)


def hostile(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Change the header of the weights, whose bytes stay."""

    def changed(folder: Path) -> None:
        path = folder / SINGLE_NAME
        whole = path.read_bytes()
        length = int.from_bytes(whole[:8], "little")
        header = json.loads(whole[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])

    return changed


def _renamed(header: dict[str, Any]) -> None:
    header["model.layers.0.mlp.up_proj.weight_q8_0"] = header.pop("model.layers.0.mlp.up_proj.weight_q4_1")


def _twice(header: dict[str, Any]) -> None:
    header["model.layers.0.mlp.up_proj.weight_q8_0"] = header.pop("model.layers.1.mlp.up_proj.weight_q4_1")


def _flat(header: dict[str, Any]) -> None:
    entry = header["model.layers.0.mlp.up_proj.weight_q4_1"]
    entry["shape"] = [entry["shape"][0] * entry["shape"][1]]


def _typed(header: dict[str, Any]) -> None:
    header["model.layers.0.mlp.up_proj.weight_q4_1"]["dtype"] = "I8"


def _bits(folder: Path) -> None:
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"]["bits"] = 5
    (folder / "config.json").write_text(json.dumps(fields))


def _names(folder: Path) -> None:
    fields = json.loads((folder / "config.json").read_text())
    fields["quantization_config"]["modules_in_8_bits"] = [7]
    (folder / "config.json").write_text(json.dumps(fields))


def _not_a_number(folder: Path) -> None:
    path = folder / SINGLE_NAME
    whole = bytearray(path.read_bytes())
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    begin = 8 + length + header["model.layers.0.mlp.up_proj.weight_q4_1"]["data_offsets"][0]
    whole[begin : begin + 2] = np.float16(np.nan).tobytes()
    path.write_bytes(whole)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (hostile(_renamed), "not one matrix in blocks"),
        (hostile(_twice), "not one matrix in blocks"),
        (hostile(_flat), "not one matrix in blocks"),
        (hostile(_typed), "not one matrix in blocks"),
        (_bits, "ggml-blocks has 4 or 8 bits"),
        (_names, "ggml-blocks has 4 or 8 bits"),
        (_not_a_number, r"up_proj.weight: a scale or minimum has values that are not finite"),
    ],
    ids=["other type", "two types", "flat", "other dtype", "bits", "names", "NaN"],
)
def test_copy_that_is_damaged_is_refused_with_one_line(
    damage: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    made = copy(make(tmp_path / "source"), tmp_path / "made")
    damage(made)
    with pytest.raises(ModelError, match=message):
        load(made, FILE)
