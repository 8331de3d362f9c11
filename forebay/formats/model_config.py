"""The shape of a model, read from config.json or GGUF metadata before any weight is touched. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.formats.config_fields import Fields
from forebay.formats.gguf import GgufFile
from forebay.formats.gguf_names import hf_config
from forebay.formats.model_types import MODEL_TYPES, model_type_of, refuse_unsupported
from forebay.formats.nested import text_config
from forebay.formats.safetensors import checkpoint_files, read_json


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """What every architecture has. Whatever only one has is in `extra`, under transformers' name for it.

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
    ends = read_json(generation).get("eos_token_id") if generation.is_file() else None
    return _parse(config, str(folder / "config.json"), more_eos_token_ids=ends)


def _parse(raw: Mapping[str, Any], where: str, more_eos_token_ids: Any = None) -> ModelConfig:
    raw = text_config(raw, where)
    model_type = model_type_of(raw, where)
    kind = MODEL_TYPES[model_type]
    refuse_unsupported(kind, raw, where)
    fields = Fields(raw, where)
    values = kind.parse(kind, fields)
    vocab_size = values["vocab_size"]
    return ModelConfig(
        model_type=model_type,
        bos_token_id=next(iter(fields.token_ids("bos_token_id", vocab_size)), None),
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size, more=more_eos_token_ids),
        **values,
    )
