"""The shape of a model, read from config.json or GGUF metadata before any weight is touched. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from forebay.base.errors import ModelError
from forebay.families.fields import Fields
from forebay.families.gguf_names import hf_config
from forebay.families.model_types import MODEL_TYPES, model_type_of
from forebay.families.nested import text_config
from forebay.families.options import unknown_options
from forebay.formats.files import is_there, read_json
from forebay.formats.gguf import GgufFile
from forebay.formats.safetensors import checkpoint_files

MAX_EXPERTS: Final = 1 << 17
"""Of all layers together, each with weights of its own: 23,000 is the most that a published model has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """What every architecture has. Whatever only one has is in `extra`, under transformers' name for it.

    `unknown_options` are names of fields that the file has and nobody here knows: they may change what the model
    computes elsewhere.

    `extra["layer_types"]` is there for all: `full_attention` or `sliding_attention` for each layer.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int = 0  # tokens, 0 for none
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    unknown_options: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)


def read_model_config(path: str | Path) -> ModelConfig:
    """Read the shape of the model at `path`: a folder with config.json and safetensors, or one .gguf file.

    ModelError for a model_type that is not served, and for anything in the configuration that would change what the
    model computes and is not honoured here.
    """
    path = Path(path)
    if path.suffix == ".gguf":
        return config_from_gguf(GgufFile(path))
    checkpoint_files(path)
    return config_from_folder(path)


def config_from_gguf(file: GgufFile) -> ModelConfig:
    return _parse(hf_config(file), str(file.path))


def config_from_folder(folder: Path) -> ModelConfig:
    """From config.json; generation_config.json, where there is one, adds its end tokens."""
    config = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    more = Fields.of_file(read_json(generation), str(generation)) if is_there(generation) else None
    return _parse(config, str(folder / "config.json"), generation=more)


def _parse(raw: Mapping[str, Any], where: str, generation: Fields | None = None) -> ModelConfig:
    raw = text_config(raw, where)
    model_type = model_type_of(raw, where)
    kind = MODEL_TYPES[model_type]
    fields = Fields.of_file(raw, where)
    values = kind.parse(kind, fields)
    vocab_size, num_experts = values["vocab_size"], values["extra"].get("num_experts", 0)
    if values["num_layers"] * num_experts > MAX_EXPERTS:
        layers = f"{values['num_layers']} layers of {num_experts} experts"
        raise ModelError(f"{where}: {layers}; at most {MAX_EXPERTS} experts in all are possible")
    bos_token_ids = fields.token_ids("bos_token_id", vocab_size)
    eos_token_ids = fields.token_ids("eos_token_id", vocab_size)
    if generation is not None:
        eos_token_ids += generation.token_ids("eos_token_id", vocab_size)
    return ModelConfig(
        model_type=model_type,
        bos_token_id=next(iter(bos_token_ids), None),
        eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
        unknown_options=unknown_options(fields, kind.harmless),
        **values,
    )
