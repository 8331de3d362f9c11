from __future__ import annotations

from dataclasses import replace

from forebay.families.stablelm.config import StableLmConfig
from forebay.layers.attention import AttentionSpec, QkNorm
from forebay.layers.blocks import ResidualSpec, SublayerSpec
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.norms import layer_norm_spec
from forebay.layers.sums import SumSpec
from forebay.models.decoder import DecoderSpec, decoder_spec, layer_name, mlp_spec
from forebay.models.families.parts.partial_rotary import partly_rotated

_NORMS = ("q_layernorm.norms.{}", "k_layernorm.norms.{}")


def describe(config: StableLmConfig) -> DecoderSpec:
    """Describe the whole model, whose norms are LayerNorms."""
    blocks = [_block(config, layer) for layer in range(config.num_layers)]
    return replace(decoder_spec(config, blocks), norm=layer_norm_spec("model.norm", config.hidden_size, bias=True))


def _block(config: StableLmConfig, layer: int) -> BlockSpec:
    attention, mlp = _attention(config, layer), mlp_spec(config, layer)
    parts: dict[str, PartSpec] = {"input_layernorm": attention, "post_attention_layernorm": mlp}
    if config.parallel:
        parts = {"input_layernorm": SumSpec(first=attention, second=mlp)}
    sublayers = (
        SublayerSpec(part=part, before=layer_norm_spec(f"{layer_name(layer)}.{name}", config.hidden_size, bias=True))
        for name, part in parts.items()
    )
    return ResidualSpec(sublayers=tuple(sublayers), norm_eps=config.rms_norm_eps)


def _attention(config: StableLmConfig, layer: int) -> AttentionSpec:
    norm = QkNorm.LAYER if config.use_qk_norm else QkNorm.NONE
    return replace(partly_rotated(config, layer), o_bias=False, qk_norm=norm, norm_names=_NORMS)
