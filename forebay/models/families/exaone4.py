from __future__ import annotations

from forebay.families.model_config import ModelConfig
from forebay.families.transformer import SLIDING
from forebay.layers.attention import AttentionSpec, QkNorm
from forebay.layers.build import BlockSpec
from forebay.models.decoder import attention_spec
from forebay.models.families.olmo2 import norms_behind


def block(config: ModelConfig, layer: int) -> BlockSpec:
    """Describe a layer: OLMo 2's norms, around attention of its own."""
    return norms_behind(config, layer, windowed_rope_attention(config, layer))


def windowed_rope_attention(config: ModelConfig, layer: int) -> AttentionSpec:
    """Describe attention that is rotated in layers with a window, and in all layers of a model without windows."""
    rotated = not config.sliding_window or config.layer_types[layer] == SLIDING
    return attention_spec(config, layer, qk_norm=QkNorm.HEAD, rope=rotated)
