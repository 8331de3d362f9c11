from __future__ import annotations

from dataclasses import replace

from forebay.families.config.model_config import ModelConfig
from forebay.layers.blocks import ResidualSpec, SublayerSpec
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.mlp import Activation, MlpSpec
from forebay.layers.norms import layer_norm_spec
from forebay.models.decoder import DecoderSpec, attention_spec, decoder_spec, layer_name, mlp_spec


def describe(config: ModelConfig) -> DecoderSpec:
    """Describe the whole model, whose norms are LayerNorms."""
    blocks = [_block(config, layer) for layer in range(config.num_layers)]
    return replace(decoder_spec(config, blocks), norm=layer_norm_spec("model.norm", config.hidden_size, bias=True))


def _block(config: ModelConfig, layer: int) -> BlockSpec:
    parts: dict[str, PartSpec] = {
        "input_layernorm": attention_spec(config, layer),
        "post_attention_layernorm": _mlp(config, layer),
    }
    sublayers = (
        SublayerSpec(part=part, before=layer_norm_spec(f"{layer_name(layer)}.{name}", config.hidden_size, bias=True))
        for name, part in parts.items()
    )
    return ResidualSpec(sublayers=tuple(sublayers), norm_eps=config.rms_norm_eps)


def _mlp(config: ModelConfig, layer: int) -> MlpSpec:
    return replace(mlp_spec(config, layer), activation=Activation.GELU_TANH_UNGATED, names=("c_fc", "c_proj"))
