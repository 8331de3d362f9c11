from __future__ import annotations

from forebay.families.parts.experts import GroupedConfig
from forebay.layers.build import BlockSpec
from forebay.models.decoder import block_spec
from forebay.models.families.parts.latent import feed_forward
from forebay.models.families.parts.windows import windowed_rope_attention


def block(config: GroupedConfig, layer: int) -> BlockSpec:
    """Describe a layer: EXAONE 4's attention, and an MLP or experts, each behind a norm."""
    return block_spec(config, layer, windowed_rope_attention(config, layer), feed_forward(config, layer))
