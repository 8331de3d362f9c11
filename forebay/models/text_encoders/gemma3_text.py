from __future__ import annotations

from forebay.families.config.model_config import ModelConfig
from forebay.families.config.transformer import SLIDING
from forebay.families.gemma3_text.config import Gemma3EncoderConfig
from forebay.layers.encoder_layer import EncoderLayerSpec
from forebay.layers.encoder_mlp import EncoderMlpSpec
from forebay.layers.norms import NormSpec
from forebay.layers.params import vector
from forebay.layers.rotary import RopeSpec
from forebay.layers.segments import SegmentAttentionSpec
from forebay.layers.text_embeddings import TextEmbeddingsSpec
from forebay.models.families.parts.gemma import NORM_OFFSET
from forebay.models.text_encoder import TextEncoderSpec, head_behind


def describe(config: ModelConfig) -> TextEncoderSpec:
    """Describe an EmbeddingGemma: the layers of Gemma 3, whose tokens see both sides."""
    assert isinstance(config, Gemma3EncoderConfig), config.model_type
    return TextEncoderSpec(
        embeddings=TextEmbeddingsSpec(
            words="model.embed_tokens",
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            scale=float(config.hidden_size) ** 0.5,
        ),
        layers=tuple(_layer(config, i) for i in range(config.num_layers)),
        norm=_norm("model.norm", config.hidden_size),
        norm_eps=config.rms_norm_eps,
        max_positions=config.max_position_embeddings,
        head=head_behind(config, (), ""),
    )


def _norm(name: str, size: int) -> NormSpec:
    return vector(f"{name}.weight", size, offset=NORM_OFFSET)


def _layer(config: Gemma3EncoderConfig, number: int) -> EncoderLayerSpec:
    layer, width, kind = f"model.layers.{number}", config.hidden_size, config.layer_types[number]
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"
    return EncoderLayerSpec(
        attention=SegmentAttentionSpec(
            names=tuple(f"{attention}.{name}" for name in ("q_proj", "k_proj", "v_proj")),
            output=f"{attention}.o_proj",
            hidden_size=width,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            bias=config.attention_bias,
            output_bias=config.attention_bias,
            rope=RopeSpec(config.head_dim, *config.ropes[kind]),
            reach=config.reach if kind == SLIDING else 0,
            head_norms=(_norm(f"{attention}.q_norm", config.head_dim), _norm(f"{attention}.k_norm", config.head_dim)),
            norm_eps=config.rms_norm_eps,
            scale=config.query_pre_attn_scalar**-0.5,
        ),
        mlp=EncoderMlpSpec(
            up=f"{mlp}.up_proj",
            gate=f"{mlp}.gate_proj",
            down=f"{mlp}.down_proj",
            hidden_size=width,
            intermediate_size=config.intermediate_size,
            activation=config.activation,
            up_bias=False,
            down_bias=False,
        ),
        norms=(_norm(f"{layer}.input_layernorm", width), _norm(f"{layer}.pre_feedforward_layernorm", width)),
        inner_norms=(
            _norm(f"{layer}.post_attention_layernorm", width),
            _norm(f"{layer}.post_feedforward_layernorm", width),
        ),
        norm_eps=config.rms_norm_eps,
        norm_first=True,
    )
