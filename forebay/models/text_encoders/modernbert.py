from __future__ import annotations

from dataclasses import replace

from forebay.families.config.model_config import ModelConfig
from forebay.families.config.transformer import SLIDING
from forebay.families.text_encoders.modernbert import ModernBertConfig
from forebay.layers.encoder_head import HeadLayerSpec, HeadSpec, JointHeadSpec
from forebay.layers.encoder_layer import EncoderLayerSpec
from forebay.layers.norms import LayerNormSpec, layer_norm_spec
from forebay.layers.rotary import RopeSpec
from forebay.models.text_encoder import (
    LayerNames,
    TextEncoderSpec,
    attention_spec,
    embeddings_spec,
    head_behind,
    layer_spec,
)


def describe(config: ModelConfig) -> TextEncoderSpec:
    """Describe a ModernBERT; its head reads the first token, or the mean, through a layer with a norm."""
    assert isinstance(config, ModernBertConfig), config.model_type
    embeddings = replace(
        embeddings_spec(config), words="embeddings.tok_embeddings", positions="", norm=_norm(config, "embeddings.norm")
    )
    return TextEncoderSpec(
        embeddings=embeddings,
        layers=tuple(_layer(config, i) for i in range(config.num_layers)),
        norm=_norm(config, "final_norm"),
        norm_eps=config.rms_norm_eps,
        max_positions=config.max_position_embeddings,
        head=_head(config),
    )


def _norm(config: ModernBertConfig, name: str) -> LayerNormSpec:
    return layer_norm_spec(name, config.hidden_size, bias=config.norm_bias)


def _layer(config: ModernBertConfig, number: int) -> EncoderLayerSpec:
    name, local = f"layers.{number}", config.layer_types[number] == SLIDING
    names = LayerNames(
        qkv=("attn.Wqkv",),
        output="attn.Wo",
        attention_norm="attn_norm",
        up="mlp.Wi",
        gate="mlp.Wi",
        down="mlp.Wo",
        mlp_norm="mlp_norm",
        biases=(config.attention_bias, config.mlp_bias, config.mlp_bias),
    )
    layer = layer_spec(config, name, names)
    rope = RopeSpec(config.head_dim, config.local_theta if local else config.rope_theta)
    return replace(
        layer,
        attention=replace(attention_spec(config, name, names), rope=rope, reach=config.reach if local else 0),
        mlp=replace(layer.mlp, gate_first=True),
        norms=(None if number == 0 else _norm(config, f"{name}.attn_norm"), _norm(config, f"{name}.mlp_norm")),
        norm_first=True,
    )


def _head(config: ModernBertConfig) -> HeadSpec | JointHeadSpec | None:
    before = HeadLayerSpec(
        name="head.dense",
        inputs=config.hidden_size,
        outputs=config.hidden_size,
        bias=config.head_bias,
        activation=config.head_activation,
        norm=_norm(config, "head.norm"),
        norm_eps=config.rms_norm_eps,
    )
    return head_behind(config, (before,), "classifier")
