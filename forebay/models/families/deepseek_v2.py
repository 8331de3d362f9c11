from __future__ import annotations

from forebay.families.parts.latent import LatentConfig
from forebay.layers.build import BlockSpec
from forebay.models.decoder import block_spec, layer_name
from forebay.models.families.parts.latent import latent_attention_spec, softmax_feed_forward


def block(config: LatentConfig, layer: int) -> BlockSpec:
    """Describe a layer: latent attention, and an MLP or experts."""
    attention = latent_attention_spec(config, f"{layer_name(layer)}.self_attn")
    return block_spec(config, layer, attention, softmax_feed_forward(config, layer))
