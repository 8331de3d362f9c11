from __future__ import annotations

from dataclasses import replace

from forebay.families.config.model_config import ModelConfig
from forebay.layers.build import BlockSpec
from forebay.layers.mlp import Activation
from forebay.models.decoder import DecoderSpec, attention_spec, block_spec, mlp_spec
from forebay.models.families.parts.gemma import NORM_OFFSET, with_blocks


def describe(config: ModelConfig) -> DecoderSpec:
    """Describe the whole model: norms before each part, and scaled embeddings."""
    return with_blocks(config, [_block(config, layer) for layer in range(config.num_layers)])


def _block(config: ModelConfig, layer: int) -> BlockSpec:
    mlp = replace(mlp_spec(config, layer), activation=Activation.GELU_TANH)
    return block_spec(config, layer, attention_spec(config, layer), mlp, norm_offset=NORM_OFFSET)
