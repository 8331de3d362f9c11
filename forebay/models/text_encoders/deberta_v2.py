from __future__ import annotations

from dataclasses import replace

from forebay.families.config.model_config import ModelConfig
from forebay.families.text_encoders.deberta_v2 import DebertaConfig
from forebay.layers.disentangled_attention import DisentangledAttentionSpec, DistancesSpec
from forebay.layers.encoder_layer import EncoderLayerSpec
from forebay.layers.norms import layer_norm_spec
from forebay.models.text_encoder import BERT_NAMES, TextEncoderSpec, embeddings_spec, head_spec, layer_spec


def describe(config: ModelConfig) -> TextEncoderSpec:
    """Describe a DeBERTa; its head reads the first token, through the pooler."""
    assert isinstance(config, DebertaConfig), config.model_type
    embeddings = embeddings_spec(config)
    norm = layer_norm_spec("encoder.LayerNorm", config.hidden_size, bias=True) if config.normed_distances else None
    return TextEncoderSpec(
        embeddings=embeddings if config.has_positions else replace(embeddings, positions=""),
        layers=tuple(_layer(config, f"encoder.layer.{i}") for i in range(config.num_layers)),
        distances=DistancesSpec(
            name="encoder.rel_embeddings",
            hidden_size=config.hidden_size,
            span=config.span,
            far=config.far,
            norm=norm,
            norm_eps=config.rms_norm_eps,
        ),
        max_positions=config.max_position_embeddings,
        head=head_spec(config, dense="pooler.dense", activation=config.head_activation),
    )


def _layer(config: DebertaConfig, layer: str) -> EncoderLayerSpec:
    own = f"{layer}.attention.self"
    attention = DisentangledAttentionSpec(
        names=(f"{own}.query_proj", f"{own}.key_proj", f"{own}.value_proj"),
        output=f"{layer}.{BERT_NAMES.output}",
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        of_distances=() if config.shared_keys else (f"{own}.pos_query_proj", f"{own}.pos_key_proj"),
    )
    return replace(layer_spec(config, layer, BERT_NAMES), attention=attention)
