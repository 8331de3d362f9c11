"""A checkpoint with its matrices in 4 or 8 bits, as a folder that is served like any other.

Each matrix has the codes that a start with `--quantization` gives it, so the tokens are the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from forebay.base.errors import ModelError
from forebay.families.checkpoint import Checkpoint
from forebay.formats.block_layers import BlockPacking, fields_of, row_bytes, stored_name, to_blocks
from forebay.formats.files import read_json
from forebay.formats.held_format import QUANTIZED_BITS, QUANTIZED_FORMATS
from forebay.formats.quantization import Quantization
from forebay.formats.quantized import CodeFormat, StoredCodes
from forebay.formats.safetensors import INDEX_NAME, SINGLE_NAME
from forebay.formats.safetensors_writer import Entry, write_safetensors
from forebay.formats.stored_tensor import StoredTensor, as_float32
from forebay.layers.params import TensorParam
from forebay.models import needs_of
from forebay.models.loader import Progress, check_names
from forebay.models.weight_codes import Round, codes_of, codes_of_part

# Of one file: its header stays far below what readers allow.
_MOST_TENSORS: Final = 1 << 15
_COPIED: Final = frozenset({".json", ".jinja", ".txt", ".model", ".tiktoken"})  # tokenizer, template, sampling


class _Written(NamedTuple):
    """A tensor under the name that it gets in the files."""

    name: str
    entry: Entry
    values: Callable[[], Iterator[memoryview]]


def write_quantized(
    checkpoint: Checkpoint, folder: Path, quantization: Quantization, round_into: Round, progress: Progress
) -> int:
    """Write the checkpoint to the empty `folder`; return the bytes of its weights. An encoder of pictures stays as it
    is; draft heads are not copied.

    Raises ModelError for weights that are in codes already which `quantization` keeps, OSError if the disk is full.
    """
    params = needs_of(checkpoint.config).params
    check_names(checkpoint, params)
    codes = _codes(checkpoint, params, quantization, round_into)
    tensors = [_written(name, checkpoint.tensors[name], held) for name, held in codes.items()]
    tensors += [_written(name, tensor, None) for name, tensor in checkpoint.encoder.items()]
    total, done = sum(tensor.entry.num_bytes for tensor in tensors), 0

    def counted(tensors: Sequence[_Written]) -> Iterator[memoryview]:
        nonlocal done
        for tensor in tensors:
            try:
                for piece in tensor.values():
                    yield piece
                    done += piece.nbytes
                    progress(done, total)
            except ModelError as error:
                raise ModelError(f"{checkpoint.path}: {tensor.name}: {error.message}") from None

    _write_files(folder, tensors, counted)
    matrices = {name: held for name, held in codes.items() if len(checkpoint.tensors[name].shape) == 2}
    matrices |= dict.fromkeys(name for name, tensor in checkpoint.encoder.items() if len(tensor.shape) == 2)
    _write_config(checkpoint.path, folder, _packing(matrices, quantization))
    for path in checkpoint.path.iterdir():
        if path.suffix in _COPIED and path.name not in ("config.json", INDEX_NAME) and path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    return total


def _codes(
    checkpoint: Checkpoint, params: Sequence[TensorParam], quantization: Quantization, round_into: Round
) -> dict[str, StoredCodes | None]:
    """Return the codes that are written for each tensor; None for its values."""
    found: dict[str, StoredCodes | None] = {}
    for param in params:
        whole = codes_of(param, checkpoint.tensors, quantization)
        for name in param.names:
            tensor = checkpoint.tensors[name]
            if whole is None:
                found[name] = None
                continue
            held = codes_of_part(tensor, quantization, param.min_bits, round_into)
            if held is tensor.codes or held is None or held.sources[0].format not in QUANTIZED_FORMATS.values():
                raise ModelError(
                    f"{checkpoint.path}: {name} is in codes already ({tensor.storage}), which "
                    f"--quantization {quantization} keeps: serve the checkpoint as it is"
                )
            found[name] = held
    return found


def _written(name: str, tensor: StoredTensor, codes: StoredCodes | None) -> _Written:
    if codes is None:
        return _Written(name, Entry("BF16" if tensor.bfloat16 else "F32", tensor.shape), lambda: _plain(tensor))
    form = codes.sources[0].format
    rows, width = codes.shape
    entry = Entry("U8", (rows, row_bytes(form, width)))
    return _Written(stored_name(name, form), entry, lambda: _blocks(codes, rows))


def _plain(tensor: StoredTensor) -> Iterator[memoryview]:
    for piece in tensor.pieces():
        if piece.size:
            values = piece if tensor.bfloat16 else as_float32(piece, bfloat16=False)
            yield np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def _blocks(codes: StoredCodes, rows: int) -> Iterator[memoryview]:
    for piece in codes.pieces(range(rows)):
        yield to_blocks(piece).reshape(-1).data


def _write_files(
    folder: Path, tensors: Sequence[_Written], values: Callable[[Sequence[_Written]], Iterator[memoryview]]
) -> None:
    shards = [tensors[first : first + _MOST_TENSORS] for first in range(0, len(tensors), _MOST_TENSORS)]
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    names = [SINGLE_NAME] if len(shards) == 1 else names
    for name, shard in zip(names, shards, strict=True):
        with (folder / name).open("xb") as file:
            write_safetensors(file, {tensor.name: tensor.entry for tensor in shard}, values(shard))
            file.flush()
            os.fsync(file.fileno())
    if len(shards) > 1:
        weight_map = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
        (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), "utf-8")


def _packing(codes: Mapping[str, StoredCodes | None], quantization: Quantization) -> BlockPacking:
    bits = QUANTIZED_BITS[quantization]

    def modules(form: CodeFormat | None) -> frozenset[str]:
        found = (name for name, held in codes.items() if (held.sources[0].format if held else None) == form)
        return frozenset(name.removesuffix(".weight") for name in found)

    wider = modules(QUANTIZED_FORMATS[8]) if bits == 4 else frozenset()
    return BlockPacking(bits=bits, wider=wider, ignored=modules(None))


def _write_config(source: Path, folder: Path, packing: BlockPacking) -> None:
    fields: dict[str, Any] = dict(read_json(source / "config.json"))
    if isinstance(inner := fields.get("text_config"), dict):
        fields["text_config"] = {name: value for name, value in inner.items() if name != "quantization_config"}
    fields["quantization_config"] = fields_of(packing)
    (folder / "config.json").write_text(json.dumps(fields, indent=2), "utf-8")
