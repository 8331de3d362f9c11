from __future__ import annotations

from dataclasses import replace

from forebay.families.parts.parallel import CohereConfig
from forebay.layers.attention import QkNorm
from forebay.models.decoder import DecoderSpec, attention_spec
from forebay.models.families.parts.parallel import parallel, with_blocks


def describe(config: CohereConfig) -> DecoderSpec:
    """Describe the whole model."""
    norm = QkNorm.LAYER if config.use_qk_norm else QkNorm.NONE
    attention = [
        replace(attention_spec(config, layer, qk_norm=norm), interleaved=True) for layer in range(config.num_layers)
    ]
    return with_blocks(config, [parallel(config, layer, each) for layer, each in enumerate(attention)])
