from __future__ import annotations

from forebay.families.smollm3.config import SmolLM3Config
from forebay.layers.build import BlockSpec
from forebay.models.decoder import DecoderSpec, attention_spec, decoder_spec, mlp_spec, pre_norm


def describe(config: SmolLM3Config) -> DecoderSpec:
    return decoder_spec(config, [_block(config, layer) for layer in range(config.num_layers)])


def _block(config: SmolLM3Config, layer: int) -> BlockSpec:
    return pre_norm(config, layer, attention_spec(config, layer, rope=config.has_rope[layer]), mlp_spec(config, layer))
