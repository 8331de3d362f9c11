from __future__ import annotations

from dataclasses import replace
from typing import Final

from forebay.families.config.model_config import ModelConfig
from forebay.families.parts.text_encoder import TextEncoderConfig
from forebay.layers.score_biases import AlibiSpec
from forebay.models.text_encoder import BERT_NAMES, TextEncoderSpec, bert_spec, head_spec

_NAMES: Final = replace(
    BERT_NAMES,
    up="mlp.gated_layers",
    gate="mlp.gated_layers",
    gate_first=True,
    down="mlp.wo",
    mlp_norm="mlp.layernorm",
    biases=(True, False, True),
)


def describe(config: ModelConfig) -> TextEncoderSpec:
    """Describe a Jina BERT v2; its head reads the first token, through the pooler."""
    assert isinstance(config, TextEncoderConfig), config.model_type
    spec = bert_spec(config, lambda own: head_spec(own, dense="pooler.dense"), _NAMES)
    return replace(spec, embeddings=replace(spec.embeddings, positions=""), bias=AlibiSpec(num_heads=config.num_heads))
