"""Reading a model's shape before its weights are there: a folder with nothing but a config.json will do, and the
beginning of a GGUF file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from forebay.base.errors import ModelError
from forebay.families.checkpoint import Checkpoint, open_checkpoint
from forebay.families.config.model_config import ModelConfig, config_from_folder, config_from_gguf
from forebay.formats.gguf import GgufFile
from forebay.formats.gguf_parts import model_file
from forebay.formats.quantization import Quantization
from forebay.formats.quantized import CodeFormat
from forebay.formats.safetensors import has_weights
from forebay.formats.stored_tensor import StoredTensor
from forebay.formats.weight_shapes import WeightKind, WeightShapes, kinds_of

if TYPE_CHECKING:
    from forebay.layers.params import TensorParam
    from forebay.models import Needs


class Shape(NamedTuple):
    """A model without its weights: configuration, what its layers ask for and keep, and the sizes of its weights."""

    config: ModelConfig
    needs: Needs
    weights: WeightShapes


def read_shape(path: Path, draft_head: bool, mmproj: Path | None = None, rank: int = 0, num_ranks: int = 1) -> Shape:
    """Read the shape of the checkpoint at `path`, with its draft head if `draft_head`, or of what one of several ranks
    has of it. The weights are those of its encoder of pictures, too, for a GGUF model in the file `mmproj`. Raises
    ModelError, also if the weights are there without the draft head, and ConfigError if so many ranks cannot divide the
    model."""
    from forebay.models import check_draft_head, needs_of  # bring torch, which nothing but this needs here
    from forebay.ops.exchange import Share  # as above

    path = model_file(path)
    config = _model_config(path) if mmproj is None else open_checkpoint(path, mmproj=mmproj).config
    needs = needs_of(config, draft_head=draft_head, share=Share(rank=rank, size=num_ranks))
    if draft_head and (path.suffix == ".gguf" or has_weights(path)):
        check_draft_head(open_checkpoint(path, draft_head=True))
    return Shape(config, needs, WeightShapes.of(_kinds(path, config, needs, mmproj)))


def adaptable_layers(path: Path) -> Mapping[str, tuple[int, int]]:
    """Return the shapes (N, K) of the layers that can have adapters, by name, of the checkpoint at `path`. Raises
    ModelError."""
    from forebay.models import AdapterSlots, needs_of  # as above

    return needs_of(_model_config(model_file(path)), adapters=AdapterSlots()).adaptable


def _kinds(path: Path, config: ModelConfig, needs: Needs, mmproj: Path | None) -> Iterator[tuple[WeightKind, int]]:
    """The weights of a GGUF file may be in codes, of which its header says so; those of a folder, of which its
    configuration does. Whether
    others are in bfloat16 is in the headers, if the weights are there; else the configuration decides."""
    from forebay.models.encoder import encoder_params  # as above
    from forebay.models.weight_codes import codes_of, is_plain_matrix, stays_bfloat16

    is_gguf = path.suffix == ".gguf"
    tensors = _tensors_of(open_checkpoint(path, mmproj=mmproj)) if is_gguf else _tensors_of_folder(path)

    def is_bfloat16(param: TensorParam) -> bool:
        has_header = tensors.keys() >= set(param.names)
        return stays_bfloat16(param, tensors) if has_header else config.in_bfloat16 and is_plain_matrix(param)

    for param in needs.params:
        if param.by_row:
            continue
        if is_gguf and tensors.keys() >= set(param.names):
            codes = codes_of(param, tensors, Quantization.FILE)
            yield from kinds_of(codes, param.shape, param.min_bits, bfloat16=is_bfloat16(param))
        else:
            own = _stored_format(param, config)
            yield WeightKind(own, param.shape[-1], param.min_bits, is_bfloat16(param)), param.num_elements
    for param in encoder_params(config):  # never in codes, and rows as long as these are none of a step's tokens
        yield WeightKind(None, 0, 16, is_bfloat16(param)), param.num_elements


def _tensors_of_folder(path: Path) -> Mapping[str, StoredTensor]:
    """The tensors of a folder; none if its weights are missing or damaged, which loading them reports."""
    with contextlib.suppress(ModelError):
        if has_weights(path):
            return _tensors_of(open_checkpoint(path))
    return {}


def _tensors_of(checkpoint: Checkpoint) -> Mapping[str, StoredTensor]:
    return {**checkpoint.tensors, **checkpoint.encoder}


def _stored_format(param: TensorParam, config: ModelConfig) -> CodeFormat | None:
    """The format of a weight in a folder; None if any of its matrices is not in codes."""
    if config.packing is None or len(param.shape) != 2 or (param.min_bits > 4 and not config.packing.packs_heads):
        return None
    found = {config.packing.format(name, param.shape[-1]) for name in param.names}
    return found.pop() if len(found) == 1 else None


def _model_config(path: Path) -> ModelConfig:
    if path.suffix == ".gguf":
        return config_from_gguf(GgufFile(path))
    return config_from_folder(path.parent if path.name == "config.json" else path)
