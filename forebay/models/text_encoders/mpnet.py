from __future__ import annotations

from dataclasses import replace
from typing import Final

from forebay.families.config.model_config import ModelConfig
from forebay.families.parts.text_encoder import TextEncoderConfig
from forebay.layers.score_biases import DistanceBiasSpec
from forebay.models.text_encoder import BERT_NAMES, TextEncoderSpec, embeddings_spec, head_spec, layer_spec

_NAMES: Final = replace(
    BERT_NAMES,
    qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    output="attention.attn.o",
    attention_norm="attention.LayerNorm",
)


def describe(config: ModelConfig) -> TextEncoderSpec:
    """Describe an MPNet; its head reads the first token, through a layer of its own."""
    assert isinstance(config, TextEncoderConfig), config.model_type
    return TextEncoderSpec(
        embeddings=embeddings_spec(config),
        layers=tuple(layer_spec(config, f"encoder.layer.{i}", _NAMES) for i in range(config.num_layers)),
        bias=DistanceBiasSpec(name="encoder.relative_attention_bias", num_heads=config.num_heads),
        max_positions=config.max_position_embeddings,
        head=head_spec(config, dense="classifier.dense", output="classifier.out_proj"),
    )
