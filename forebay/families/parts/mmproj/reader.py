"""The reader of a vision encoder's GGUF file beside a language model.

The metadata become the fields of a config.json around the language model, and of its image processor. The readers of
checkpoints in folders take these, so that bounds, checks and defaults are the same for both. Names of tensors and of
metadata, and what is done to tensors, are those of llama.cpp's conversion package and of its gguf-py/gguf/constants.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from forebay.base.errors import ModelError, brief
from forebay.families.base.fields import MAX_LAYERS, Fields
from forebay.families.config.model_config import ModelConfig
from forebay.families.config.outer import OUTERS, rope_sections
from forebay.families.config.vision import vision_of
from forebay.families.parts.mmproj import gemma4, internvl, pixtral, qwen, siglip
from forebay.families.parts.mmproj.projector import Header, Language, Projector, Raw, Tensors
from forebay.formats.gguf import GgufFile, GgufTensor
from forebay.formats.gguf_tensor import GgufStored, rotary_row_order
from forebay.formats.stored_tensor import StoredTensor

PROJECTORS: Final[Mapping[str, Projector]] = {
    **siglip.PROJECTORS,
    **gemma4.PROJECTORS,
    **internvl.PROJECTORS,
    **pixtral.PROJECTORS,
    **qwen.PROJECTORS,
}

_ARCHITECTURE: Final = "clip"
_OWN: Final = "clip.vision."
_TYPE_KEYS: Final = ("clip.vision.projector_type", "clip.projector_type")
_AUDIO: Final = ("a.", "mm.a.")  # encoders of audio, which are not served
_KIND: Final = re.compile(r"(.+)\.(weight|bias|(?:input|output)_(?:min|max))")
_NUMBERED: Final = re.compile(r"v\.(blk|deepstack)\.(\d{1,6})\.(\w+)")
_FEATURES: Final = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}
_SWAPPED: Final = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
_ROTATED: Final = (".attn_q.", ".attn_k.")
# Metadata without an effect on the encoder, and those that follow from tensors.
_HARMLESS: Final = frozenset(
    {"projector_type", "projection_dim", "feed_forward_length", "image_size", "wa_layer_indexes"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mmproj:
    """A language model's configuration with that of its encoder, the encoder's tensors by transformers' names, and the
    fields of an image processor. `path` is the encoder's file."""

    path: Path
    config: ModelConfig
    tensors: Tensors
    processor: Mapping[str, Any]


def open_mmproj(path: Path, config: ModelConfig, metadata: Mapping[str, Any]) -> Mmproj:
    """Open the file of an encoder for a language model of this configuration and of these GGUF metadata. Reads no
    weight. Raises ModelError for a file that is unsound, no encoder that is served, or another model's."""
    file, language = GgufFile(path), Language.of(config, metadata)
    name, projector = _projector_of(file)
    outer = projector.types.get(config.model_type)
    if outer is None:
        raise ModelError(
            f"{path}: an encoder of type {name}, which is for {', '.join(projector.types)} models, and the language "
            f"model's type is {config.model_type}"
        )
    header = Header(file, _own_fields(file), language)
    tensors = _tensors(header, projector)
    _check_width(header, projector)
    described = projector.describe(header)
    raw = {"model_type": outer, "vision_config": described.vision, **described.around}
    where = str(path)
    vision, unknown = vision_of(raw, where, described.processor, config.vocab_size) or (None, ())
    unknown = (*unknown, *sorted(f"{_OWN}{key}" for key in header.own.unread - _HARMLESS))
    sections = rope_sections(_with_sections(language), OUTERS[outer], where)
    found = replace(
        config,
        vision=vision,
        rope_sections=sections,
        unknown_options=(*config.unknown_options, *unknown),
    )
    return Mmproj(path=path, config=found, tensors=projector.restore(tensors, header), processor=described.processor)


def _projector_of(file: GgufFile) -> tuple[str, Projector]:
    """Return the projector type and how it is read. Raises ModelError for a file of another kind or type."""
    supported = f"supported are {', '.join(PROJECTORS)}"
    architecture = file.metadata.get("general.architecture")
    if architecture != _ARCHITECTURE:
        raise ModelError(
            f"{file.path}: its architecture is {brief(architecture)}, so it is no vision encoder: name an mmproj file"
        )
    found = next((file.metadata[key] for key in _TYPE_KEYS if key in file.metadata), None)
    if not isinstance(found, str) or found not in PROJECTORS:
        named = "is missing" if found is None else f"{brief(found)} is not supported"
        raise ModelError(f"{file.path}: the projector type {named}; {supported}")
    if file.metadata.get("clip.has_vision_encoder") is False:
        raise ModelError(f"{file.path}: clip.has_vision_encoder is false: audio is not served; {supported}")
    return found, PROJECTORS[found]


def _own_fields(file: GgufFile) -> Fields:
    raw = {key[len(_OWN) :]: _plain(value) for key, value in file.metadata.items() if key.startswith(_OWN)}
    return Fields.of_file(raw, f"{file.path}: {_OWN.rstrip('.')}")


def _plain(value: Any) -> Any:
    """Return a list for an array, of as many entries as are of use, and floats of 32 bits as they were written."""
    if isinstance(value, np.ndarray):
        return [_plain(entry) for entry in value[: MAX_LAYERS + 1].tolist()]
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _with_sections(language: Language) -> Raw:
    """Return the fields in which a config.json has the sections of rotary positions."""
    given = language.own("rope.dimension_sections")
    sections = given.tolist()[:3] if isinstance(given, np.ndarray) else None
    return {"text_config": {"rope_parameters": {} if sections is None else {"mrope_section": sections}}}


def _check_width(header: Header, projector: Projector) -> None:
    shape = header.shape(projector.output, 2)
    wanted, found = header.language.config.hidden_size, shape[projector.output_axis]
    if found != wanted:
        raise header.wrong(
            f"its tokens have {found} numbers, and the language model's have {wanted}: it is another model's encoder"
        )


def _tensors(header: Header, projector: Projector) -> Tensors:
    """Return the tensors by transformers' names. Raises ModelError for one that is no part of such an encoder."""
    found: dict[str, StoredTensor] = {}
    swap = header.swaps
    for stored in header.file.tensors.values():
        if stored.name.startswith(_AUDIO) or stored.name in projector.ignored:
            continue
        name = _served_name(projector, stored.name, swap=swap)
        if name is None:
            raise header.wrong(f"the tensor {stored.name!r} is no part of such an encoder as known here")
        if name in found:
            raise header.wrong(f"the tensor {stored.name!r} is there under another name as well")
        found[name] = _stored(header, projector, stored)
    return found


def _served_name(projector: Projector, stored: str, *, swap: bool) -> str | None:
    """Return transformers' name of a tensor; None for one of another model."""
    if stored in projector.names:
        return projector.names[stored]
    split = _KIND.fullmatch(stored)
    stem, kind = (split[1], f".{split[2]}") if split is not None else (stored, "")
    if stem in projector.names:
        return f"{projector.names[stem]}{kind}"
    numbered = _NUMBERED.fullmatch(stem)
    if numbered is None:
        return None
    part = _SWAPPED.get(numbered[3], numbered[3]) if swap else numbered[3]
    inside, names = projector.layers, projector.blocks
    if numbered[1] == "deepstack":
        inside, names = projector.features, _FEATURES if projector.features else {}
    return f"{inside}.{int(numbered[2])}.{names[part]}{kind}" if part in names else None


def _stored(header: Header, projector: Projector, stored: GgufTensor) -> StoredTensor:
    order = None
    if projector.rotated and any(part in stored.name for part in _ROTATED):
        order = rotary_row_order(header.file, stored, header.own.size("attention.head_count"))
    return GgufStored(stored, header.file.raw(stored.name), stored.shape, order)
