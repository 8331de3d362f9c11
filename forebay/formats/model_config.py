"""The shape of a model, read from config.json or GGUF metadata before any weight is touched. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.formats.config_fields import Fields
from forebay.formats.gguf import GgufFile
from forebay.formats.gguf_names import hf_config
from forebay.formats.model_types import MODEL_TYPES, layer_types, model_type_of, refuse_unsupported
from forebay.formats.rope_config import rope_theta_and_scaling
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

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V that one token keeps over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize


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
    model_type = model_type_of(raw, where)
    refuse_unsupported(raw, where)
    kind = MODEL_TYPES[model_type]
    fields = Fields(raw, where)
    num_layers = fields.size("num_hidden_layers", most=4096)
    num_heads = fields.size("num_attention_heads")
    hidden_size = fields.size("hidden_size")
    vocab_size = fields.size("vocab_size")
    max_positions = fields.size("max_position_embeddings", most=1 << 24)
    head_dim = fields.size("head_dim", default=kind.head_dim or max(1, hidden_size // num_heads))
    if head_dim % 2:
        raise fields.wrong("head_dim", "an even number: rotary embedding pairs its halves")
    num_kv_heads = fields.size("num_key_value_heads", default=num_heads if kind.kv_heads_default else None)
    if num_heads % num_kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads, {num_heads}")
    theta, scaling = rope_theta_and_scaling(raw, where, default_theta=kind.rope_theta, max_positions=max_positions)
    window = 0
    if kind.uses_window(raw):
        window = fields.size("sliding_window", default=0) if "sliding_window" in raw else kind.window
    return ModelConfig(
        model_type=model_type,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=fields.number("rms_norm_eps", default=kind.rms_norm_eps),
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=kind.tied),
        attention_bias=fields.flag("attention_bias", default=False),
        mlp_bias=fields.flag("mlp_bias", default=False),
        sliding_window=window,
        bos_token_id=next(iter(fields.token_ids("bos_token_id", vocab_size)), None),
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size, more=more_eos_token_ids),
        extra={"layer_types": layer_types(kind, fields, num_layers, window), **kind.extra(fields, num_layers)},
    )
