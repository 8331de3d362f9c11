"""A checkpoint as the models see it: a configuration, and tensors by transformers' names, whatever the files are."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from forebay.base.errors import ModelError
from forebay.base.log import event, get_logger
from forebay.families.base.architecture import Architecture
from forebay.families.base.embedding import dense_files, token_files
from forebay.families.base.gguf_names import LONG_ROPE, ROPE_FACTORS, architecture_of, hf_name
from forebay.families.base.tensor_names import TensorNames
from forebay.families.config.model_config import Family, ModelConfig, config_from_folder, config_from_gguf, family
from forebay.families.parts.mmproj.reader import open_mmproj
from forebay.formats.file_array import FileArray
from forebay.formats.gguf import GgufFile, GgufTensor
from forebay.formats.gguf_parts import model_file
from forebay.formats.gguf_tensor import GgufStored, rotary_row_order
from forebay.formats.layer_packing import ACTIVATION_SCALES, Parts
from forebay.formats.mmproj_files import mmproj_beside
from forebay.formats.quantized import HEAD_BITS
from forebay.formats.safetensors import MAX_CHECKPOINT_TENSORS, SafetensorsFile, checkpoint_files
from forebay.formats.stored_tensor import StoredTensor
from forebay.formats.torch_file import read_torch_file
from forebay.formats.turned_experts import GATE_UP, TurnedMatrix, turned_experts
from forebay.formats.weight_shapes import WeightShapes, kinds_of

_log = get_logger("checkpoint")
_HEAD = "lm_head.weight"
_GATE_AND_UP = ("gate_proj", "up_proj")
_BARE = "embed_tokens.weight"  # where what is saved is the layers alone, as embedders are, names begin in the middle


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """`gguf_metadata` is empty for safetensors; of a GGUF file it has the tokenizer and the chat template too.
    `num_draft_heads` are in the files; tensors of the first are here if they were asked for, those of others never.
    `encoder` has the tensors of the encoder of pictures, by the names of the files. `mmproj` is the encoder's own file
    beside a GGUF model."""

    path: Path
    config: ModelConfig
    tensors: Mapping[str, StoredTensor]
    gguf_metadata: Mapping[str, Any]
    num_draft_heads: int = 0
    encoder: Mapping[str, StoredTensor] = field(default_factory=dict)
    mmproj: Path | None = None

    @property
    def every_tensor(self) -> list[StoredTensor]:
        """Return the tensors of the language model, and of the encoder."""
        return [*self.tensors.values(), *self.encoder.values()]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.every_tensor)

    @property
    def num_table_bytes(self) -> int:
        """Return the bytes of tables that stay in the files, of which a step reads its tokens' rows."""
        is_by_row = family(self.config.model_type).names.is_by_row
        return sum(tensor.num_bytes for name, tensor in self.tensors.items() if is_by_row(name))

    def weight_shapes(self) -> WeightShapes:
        """Return the shapes of the language model's weights in memory, without knowing what it does with them: all
        matrices count as such, and those with a row for each token as embedding or head."""
        is_by_row = family(self.config.model_type).names.is_by_row
        return WeightShapes.of(
            kind
            for name, tensor in self.tensors.items()
            if not is_by_row(name)
            for kind in kinds_of(
                tensor.codes, tensor.shape, self._min_bits(tensor.shape), bfloat16=self._is_bfloat16_matrix(tensor)
            )
        )

    @staticmethod
    def _is_bfloat16_matrix(tensor: StoredTensor) -> bool:
        return tensor.bfloat16 and len(tensor.shape) == 2

    def _min_bits(self, shape: tuple[int, ...]) -> int:
        return 16 if len(shape) != 2 else HEAD_BITS if shape[0] == self.config.vocab_size else 4


def open_checkpoint(path: str | Path, *, draft_head: bool = False, mmproj: str | Path | None = None) -> Checkpoint:
    """Open a folder of safetensors or a GGUF model, by any part of it, with the tensors of its `draft_head` or without.
    `mmproj` is the file of a GGUF model's encoder. Headers are checked, no weight is read. ModelError if unsound."""
    path = model_file(Path(path))
    if path.suffix != ".gguf":
        return _open_folder(path, draft_head)
    return _open_gguf(path, None if mmproj is None else Path(mmproj))


def open_with_encoder(path: Path) -> Checkpoint:
    """Open a checkpoint as `open_checkpoint`, a GGUF model with the encoder's file beside it if that is served with
    it."""
    mmproj = mmproj_beside(model_file(path))
    try:
        return open_checkpoint(path, mmproj=mmproj)
    except ModelError:
        if mmproj is None:
            raise
        return open_checkpoint(path)


def _open_folder(path: Path, draft_head: bool) -> Checkpoint:
    config = config_from_folder(path)
    files = _opened(path)
    bare = any(_BARE in file.tensors for file in files)
    inner = _inner_names(files, config, path, bare=bare)
    found = _FolderTensors(config, family(config.model_type), draft_head=draft_head)
    for file in files:
        for stored in filter(inner.__contains__, file.tensors):
            found.add(file, stored, inner[stored])
    tensors = found.all(path)
    if found.num_unused:
        _log_unused(path, found.num_unused)
    tensors |= _dense_tensors(path) if config.is_text_encoder and config.head_outputs else {}
    config = _tied(config, has_head=_HEAD in tensors, bare=bare)
    return Checkpoint(
        path=path,
        config=config,
        tensors=tensors,
        gguf_metadata={},
        num_draft_heads=found.num_draft_heads,
        encoder=_encoder_tensors(files, config, path),
    )


class _FolderTensors:
    """The tensors of a language model in a folder, by the way in which they are stored: as they are, in packed parts of
    layers, or as turned stacks of experts. `num_unused` counts scales of activations."""

    def __init__(self, config: ModelConfig, own: Family, *, draft_head: bool) -> None:
        self._config, self._family, self._draft_head = config, own, draft_head
        self._plain: dict[str, StoredTensor] = {}
        self._turned: dict[str, FileArray] = {}
        self._layers: defaultdict[str, dict[str, FileArray]] = defaultdict(dict)
        self.num_draft_heads = self.num_unused = 0

    def add(self, file: SafetensorsFile, stored: str, inner: str) -> None:
        """Add a tensor that files of the language model alone would call `inner`. Tensors that no layer reads are left
        out."""
        config, names, packing = self._config, self._family.names, self._config.packing
        name = names.here(inner, config.num_layers)
        self.num_draft_heads += names.begins_draft_head(inner)
        if not name and self._draft_head:
            name = names.in_draft_head(inner, config.num_layers)
        if self._family.unused(config, name):
            return
        layer, _, part = name.rpartition(".")
        if packing is not None and packing.has(part, file.tensors[stored].dtype):
            self._layers[layer][part] = file.packed(stored)
        elif packing is not None and part in ACTIVATION_SCALES:
            self.num_unused += 1
        elif name and names.is_turned(name) and name not in self._turned:
            self._turned[name] = file.packed(stored)
        elif name:
            self._add_plain(_tensors_of(file, stored, name, config, names), f"{file.path}: tensor {stored!r}")

    def _add_plain(self, found: Mapping[str, StoredTensor], where: str) -> None:
        if not self._plain.keys().isdisjoint(found.keys()):  # of views it is the smaller one that is gone through
            raise ModelError(f"{where} is in another file of the checkpoint as well, or under another name")
        self._plain.update(found)

    def all(self, path: Path) -> dict[str, StoredTensor]:
        """Return all tensors by name. Raises ModelError for parts of layers or experts that are missing."""
        turned = turned_experts(self._turned, self._config.num_experts, str(path))
        return {**self._plain, **turned, **dict(_packed_layers(self._layers, self._config, path))}


def _dense_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of the dense layers behind the pooling, by the folders that they are in, and of those behind
    each token, by their files."""
    tensors: dict[str, StoredTensor] = {}
    for found in token_files(path):
        tensors |= {f"{found.stem}.linear.{name}": tensor for name, tensor in read_torch_file(found).items()}
    for found in dense_files(path):
        file = SafetensorsFile(found)
        tensors |= {f"{found.parent.name}.{stored}": PlainTensor(file, stored, whole=False) for stored in file.tensors}
    return tensors


def _encoder_tensors(files: Sequence[SafetensorsFile], config: ModelConfig, path: Path) -> Mapping[str, StoredTensor]:
    """Return the tensors of the encoder, by their names in files of transformers 5; none if it is not served."""
    if config.vision is None or config.outer is None:
        return {}
    tensors: dict[str, StoredTensor] = {}
    layers: defaultdict[str, dict[str, FileArray]] = defaultdict(dict)
    for file in files:
        for stored in filter(config.outer.is_of_encoder, file.tensors):
            name = config.vision.here(stored)
            layer, _, part = name.rpartition(".")
            if config.packing is not None and config.packing.has(part, file.tensors[stored].dtype):
                layers[layer][part] = file.packed(stored)
                continue
            if name in tensors:
                raise ModelError(f"{file.path}: tensor {stored!r} is in another file of the checkpoint as well")
            if name:
                tensors[name] = PlainTensor(file, stored, whole=False)
    return {**tensors, **dict(_packed_layers(layers, config, path))}


def _tied(config: ModelConfig, *, has_head: bool, bare: bool) -> ModelConfig:
    """As in transformers: a head in the files is used, whatever the configuration has. A checkpoint of layers alone has
    no head, and counts as tied."""
    return replace(config, tie_word_embeddings=bare) if has_head or bare else config


def _inner_names(files: Sequence[SafetensorsFile], config: ModelConfig, path: Path, *, bare: bool) -> Mapping[str, str]:
    """Return what files of the language model alone would call each of its tensors, by the names that these have."""
    stored = [name for file in files for name in file.tensors]
    if config.outer is None:
        return {name: f"model.{name}" if bare else name for name in stored}
    names, parts = config.outer.inner_names(stored, str(path), with_encoder=config.vision is not None)
    if parts:
        _log_not_served(path, ",".join(parts))
    return names


def _tensors_of(
    file: SafetensorsFile, stored: str, name: str, config: ModelConfig, names: TensorNames
) -> Mapping[str, StoredTensor]:
    """One tensor under its name, or, of a stack of experts, each under its own."""
    if names.is_stack(name):
        return _experts_of(file, stored, name, config, names)
    return {name: PlainTensor(file, stored, whole=name.endswith(names.whole))}


def _packed_layers(layers: Mapping[str, Parts], config: ModelConfig, path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """The weight of each layer that is in parts."""
    for layer, parts in layers.items():
        assert config.packing is not None
        yield f"{layer}.weight", config.packing.layer(parts, f"{path}: {layer}")


@functools.cache
def _log_unused(path: Path, num_scales: int) -> None:
    _log.info(event("activation_scales_unused", path=path, number=num_scales, note="inputs are not rounded to floats"))


@functools.cache
def _log_not_served(path: Path, parts: str) -> None:
    _log.info(event("parts_not_served", path=path, parts=parts, note="requests that need them are refused"))


def _opened(path: Path) -> list[SafetensorsFile]:
    files: list[SafetensorsFile] = []
    num_tensors = 0
    for name in checkpoint_files(path):
        files.append(SafetensorsFile(name))
        num_tensors += len(files[-1].tensors)
        if num_tensors > MAX_CHECKPOINT_TENSORS:
            raise ModelError(f"{path}: more than {MAX_CHECKPOINT_TENSORS} tensors in {len(files)} of its files")
    return files


def _experts_of(
    file: SafetensorsFile, stored: str, name: str, config: ModelConfig, names: TensorNames
) -> Mapping[str, StoredTensor]:
    """The matrices that are stacked in one tensor, each under a name of its own: of gate_up_proj, [E, 2I, H], an
    expert's gate is in the first half of the rows. Some outer models have inputs before outputs, [E, H, 2I]."""
    shape, (prefix, _, kind) = file.tensors[stored].shape, name.rpartition(".")
    parts = names.expert_parts[:2] if kind == GATE_UP else names.expert_parts[2:]
    if len(shape) != 3 or 0 in shape or shape[0] != config.num_experts:
        raise ModelError(f"{file.path}: {stored!r} has the shape {shape}, not one matrix for each expert")
    turned = config.outer is not None and config.outer.turned_stacks and shape[1:] != _expected(kind, config)
    outputs = shape[2 if turned else 1]
    if outputs % len(parts):
        raise ModelError(f"{file.path}: {stored!r} has the shape {shape}, whose {outputs} outputs are no gate and up")
    size = outputs // len(parts)
    found: dict[str, StoredTensor] = {}
    for expert in range(shape[0]):
        for i, part in enumerate(parts):
            of_part = slice(i * size, (i + 1) * size)
            found[f"{prefix}.{expert}.{part}.weight"] = (
                TurnedMatrix(file.packed(stored), expert, of_part)
                if turned
                else _ExpertTensor(file, stored, expert, of_part)
            )
    return found


def _expected(kind: str, config: ModelConfig) -> tuple[int, int]:
    """Outputs and inputs of one matrix of a stack."""
    assert config.experts is not None, config.model_type
    size = config.experts.intermediate_size
    return (2 * size, config.hidden_size) if kind == GATE_UP else (config.hidden_size, size)


def _open_gguf(path: Path, mmproj: Path | None) -> Checkpoint:
    file = GgufFile(path)
    config = config_from_gguf(file)
    found = None if mmproj is None else open_mmproj(mmproj, config, file.metadata)
    _, architecture = architecture_of(file)
    tensors: dict[str, StoredTensor] = {}
    for stored in file.tensors.values():
        if stored.name not in (ROPE_FACTORS, *LONG_ROPE.values()):  # part of the configuration
            tensors.update(_gguf_tensors(file, stored, architecture, config))
    tensors = architecture.restore(architecture.reorder(tensors, config))
    return Checkpoint(
        path=file.path,
        config=config if found is None else found.config,
        tensors=tensors,
        gguf_metadata=file.metadata,
        encoder={} if found is None else found.tensors,
        mmproj=mmproj,
    )


def _gguf_tensors(
    file: GgufFile, stored: GgufTensor, architecture: Architecture, config: ModelConfig
) -> dict[str, StoredTensor]:
    """One tensor under its name, or, of a stack of experts, each under its own."""
    name = hf_name(file, architecture, stored.name)
    if "{}" in name:
        return _gguf_experts(file, stored, name, config)
    raw = file.raw(stored.name)
    heads = _rotated_heads(name, config) if architecture.interleaved_rope else 0
    order = rotary_row_order(file, stored, heads) if heads else None
    return {name: GgufStored(stored, raw, stored.shape, order)}


def _gguf_experts(file: GgufFile, stored: GgufTensor, name: str, config: ModelConfig) -> dict[str, StoredTensor]:
    """Return each expert of a stack under a name of its own. Of gate with up, gate is in the first half of an
    expert's rows."""
    shape, raw = stored.shape, file.raw(stored.name)
    if len(shape) not in (2, 3) or 0 in shape or shape[0] != config.num_experts:
        raise ModelError(f"{file.path}: {stored.name!r} has the shape {shape}, not one part for each expert")
    names = [name.replace(GATE_UP, part) for part in _GATE_AND_UP] if f".{GATE_UP}." in name else [name]
    if shape[1] % len(names):
        raise ModelError(
            f"{file.path}: {stored.name!r} has the shape {shape}, whose {shape[1]} rows are no gate and up"
        )
    shape = (shape[0], shape[1] // len(names), *shape[2:])
    rows = math.prod(shape[1:-1])
    raw = raw.reshape(shape[0] * len(names) * rows, raw.nbytes // (shape[0] * len(names) * rows))
    firsts = range(0, len(raw), rows)
    parts = [part.format(expert) for expert in range(shape[0]) for part in names]
    return {
        part: GgufStored(stored, raw.part(first, first + rows), shape[1:], None)
        for part, first in zip(parts, firsts, strict=True)
    }


def _rotated_heads(name: str, config: ModelConfig) -> int:
    if ".q_proj." in name:
        return config.num_heads
    return config.num_kv_heads if ".k_proj." in name else 0


class PlainTensor:
    """A tensor of a safetensors file."""

    codes = None

    def __init__(self, file: SafetensorsFile, name: str, *, whole: bool) -> None:
        self._read = file.packed if whole else file.values
        self._tensor = file.tensors[name]
        self.shape = self._tensor.shape
        self.bfloat16 = self._tensor.dtype == "BF16"
        self.num_bytes = self._tensor.num_bytes
        self.storage = self._tensor.dtype

    def array(self) -> FileArray:
        """Return the tensor as it is in the file, unread."""
        return self._read(self._tensor.name)

    def pieces(self) -> Iterator[npt.NDArray[Any]]:
        """Read the tensor as consecutive blocks of rows."""
        values = self.array()
        if values.nbytes:
            yield from values.reshape(math.prod(self.shape[:-1]), self.shape[-1] if self.shape else 1).pieces()
        else:
            yield np.empty((0, 0), values.dtype)


class _ExpertTensor:
    """Some rows of one matrix of a stack in a safetensors file."""

    codes = None

    def __init__(self, file: SafetensorsFile, name: str, expert: int, rows: slice) -> None:
        self._file = file
        self._tensor = file.tensors[name]
        self._at = expert, rows
        experts, every_row, width = self._tensor.shape
        self.shape = (rows.stop - rows.start, width)
        self.bfloat16 = self._tensor.dtype == "BF16"
        self.num_bytes = self._tensor.num_bytes * self.shape[0] // (experts * every_row)
        self.storage = self._tensor.dtype

    def pieces(self) -> Iterator[npt.NDArray[Any]]:
        expert, rows = self._at
        experts, every_row, width = self._tensor.shape
        matrices = self._file.values(self._tensor.name).reshape(experts * every_row, width)
        yield from matrices.part(expert * every_row + rows.start, expert * every_row + rows.stop).pieces()
