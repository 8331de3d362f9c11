from __future__ import annotations

from dataclasses import replace

from forebay.families.config.transformer import SLIDING
from forebay.families.parts.parallel import CohereConfig
from forebay.layers.attention import AttentionSpec
from forebay.models.decoder import DecoderSpec, attention_spec
from forebay.models.families.parts.parallel import parallel, with_blocks


def describe(config: CohereConfig) -> DecoderSpec:
    """Describe the whole model, whose layers without a window have no rotary embedding."""
    return with_blocks(config, [parallel(config, i, _attention(config, i)) for i in range(config.num_layers)])


def _attention(config: CohereConfig, layer: int) -> AttentionSpec:
    rotated = config.layer_types[layer] == SLIDING
    return replace(attention_spec(config, layer, rope=rotated), interleaved=rotated)
