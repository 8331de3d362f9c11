from __future__ import annotations

from forebay.families.config.model_config import ModelConfig
from forebay.models.text_encoder import LayerNames, TextEncoderSpec, head_spec, rotary_spec

_NAMES = LayerNames(
    qkv=("attn.Wqkv",),
    output="attn.out_proj",
    attention_norm="norm1",
    up="mlp.fc11",
    gate="mlp.fc12",
    down="mlp.fc2",
    mlp_norm="norm2",
    biases=(False, False, False),
)


def describe(config: ModelConfig) -> TextEncoderSpec:
    """Describe a NomicBERT; its head reads the first token, through the pooler."""
    return rotary_spec(
        config, "encoder.layers", _NAMES, norm="emb_ln", head=lambda own: head_spec(own, dense="pooler.dense")
    )
