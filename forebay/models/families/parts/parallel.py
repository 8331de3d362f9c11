"""Blocks of attention and MLP in parallel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from forebay.families.parts.parallel import CohereConfig
from forebay.layers.attention import AttentionSpec
from forebay.layers.blocks import ResidualSpec, SublayerSpec
from forebay.layers.build import BlockSpec
from forebay.layers.norms import layer_norm_spec
from forebay.layers.sums import SumSpec
from forebay.models.decoder import DecoderSpec, decoder_spec, layer_name, mlp_spec


def with_blocks(config: CohereConfig, blocks: Sequence[BlockSpec]) -> DecoderSpec:
    """Describe a model with a LayerNorm in the end, and scaled logits."""
    norm = layer_norm_spec("model.norm", config.hidden_size, bias=False)
    return replace(decoder_spec(config, blocks), norm=norm, logits_scale=config.logit_scale)


def parallel(config: CohereConfig, layer: int, attention: AttentionSpec) -> BlockSpec:
    """Describe a layer of attention and an MLP, both on what one norm gives."""
    norm = layer_norm_spec(f"{layer_name(layer)}.input_layernorm", config.hidden_size, bias=False)
    both = SumSpec(first=attention, second=mlp_spec(config, layer))
    return ResidualSpec(sublayers=(SublayerSpec(part=both, before=norm),), norm_eps=config.rms_norm_eps)
