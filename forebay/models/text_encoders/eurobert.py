from __future__ import annotations

from forebay.families.config.model_config import ModelConfig
from forebay.families.parts.text_encoder import TextEncoderConfig
from forebay.layers.encoder_layer import EncoderLayerSpec
from forebay.layers.encoder_mlp import EncoderMlpSpec
from forebay.layers.norms import NormSpec
from forebay.layers.params import vector
from forebay.layers.rotary import RopeSpec
from forebay.layers.segments import SegmentAttentionSpec
from forebay.layers.text_embeddings import TextEmbeddingsSpec
from forebay.models.text_encoder import TextEncoderSpec, head_spec


def describe(config: ModelConfig) -> TextEncoderSpec:
    """Describe a EuroBERT; its head reads the first token, or the mean, through a layer."""
    assert isinstance(config, TextEncoderConfig), config.model_type
    return TextEncoderSpec(
        embeddings=TextEmbeddingsSpec(
            words="embed_tokens", vocab_size=config.vocab_size, hidden_size=config.hidden_size
        ),
        layers=tuple(_layer(config, f"layers.{i}") for i in range(config.num_layers)),
        norm=_norm("norm", config),
        norm_eps=config.rms_norm_eps,
        max_positions=config.max_position_embeddings,
        head=head_spec(config, dense="dense", activation="gelu"),
    )


def _norm(name: str, config: TextEncoderConfig) -> NormSpec:
    return vector(f"{name}.weight", config.hidden_size)


def _layer(config: TextEncoderConfig, layer: str) -> EncoderLayerSpec:
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    return EncoderLayerSpec(
        attention=SegmentAttentionSpec(
            names=tuple(f"{attention}.{name}" for name in ("q_proj", "k_proj", "v_proj")),
            output=f"{attention}.o_proj",
            hidden_size=config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            rope=RopeSpec(config.head_dim, config.rope_theta, config.rope_scaling),
        ),
        mlp=EncoderMlpSpec(
            up=f"{mlp}.up_proj",
            gate=f"{mlp}.gate_proj",
            down=f"{mlp}.down_proj",
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            activation=config.activation,
            up_bias=config.mlp_bias,
            down_bias=config.mlp_bias,
        ),
        norms=(_norm(f"{layer}.input_layernorm", config), _norm(f"{layer}.post_attention_layernorm", config)),
        norm_eps=config.rms_norm_eps,
        norm_first=True,
    )
