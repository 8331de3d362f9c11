from __future__ import annotations

from forebay.families.config.model_config import ModelConfig
from forebay.layers.build import BlockSpec
from forebay.models.families.parts.norms_behind import norms_behind
from forebay.models.families.parts.windows import windowed_rope_attention


def block(config: ModelConfig, layer: int) -> BlockSpec:
    """Describe a layer: OLMo 2's norms, around attention of its own."""
    return norms_behind(config, layer, windowed_rope_attention(config, layer))
