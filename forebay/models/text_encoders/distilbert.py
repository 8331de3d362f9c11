from __future__ import annotations

from forebay.families.config.model_config import ModelConfig
from forebay.families.parts.text_encoder import TextEncoderConfig
from forebay.models.text_encoder import LayerNames, TextEncoderSpec, embeddings_spec, head_spec, layer_spec

_NAMES = LayerNames(
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    output="attention.out_lin",
    attention_norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    mlp_norm="output_layer_norm",
)


def describe(config: ModelConfig) -> TextEncoderSpec:
    """Describe a DistilBERT; its head reads the first token."""
    assert isinstance(config, TextEncoderConfig), config.model_type
    return TextEncoderSpec(
        embeddings=embeddings_spec(config),
        layers=tuple(layer_spec(config, f"transformer.layer.{i}", _NAMES) for i in range(config.num_layers)),
        max_positions=config.max_position_embeddings,
        head=head_spec(config, dense="pre_classifier", activation="relu"),
    )
