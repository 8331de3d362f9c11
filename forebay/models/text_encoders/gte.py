from __future__ import annotations

from forebay.families.config.model_config import ModelConfig
from forebay.models.text_encoder import LayerNames, TextEncoderSpec, head_spec, rotary_spec

_NAMES = LayerNames(
    qkv=("attention.qkv_proj",),
    output="attention.o_proj",
    attention_norm="attn_ln",
    up="mlp.up_gate_proj",
    gate="mlp.up_gate_proj",
    down="mlp.down_proj",
    mlp_norm="mlp_ln",
    biases=(True, False, True),
)


def describe(config: ModelConfig) -> TextEncoderSpec:
    """Describe a GTE; its head reads the first token, through the pooler."""
    return rotary_spec(
        config,
        "encoder.layer",
        _NAMES,
        norm="embeddings.LayerNorm",
        head=lambda own: head_spec(own, dense="pooler.dense"),
    )
