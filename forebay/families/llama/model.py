from __future__ import annotations

from forebay.families.model_config import ModelConfig
from forebay.models.decoder import DecoderSpec, attention_spec, decoder_spec, mlp_spec, pre_norm


def describe(config: ModelConfig) -> DecoderSpec:
    layers = range(config.num_layers)
    return decoder_spec(config, [pre_norm(config, i, attention_spec(config, i), mlp_spec(config, i)) for i in layers])
