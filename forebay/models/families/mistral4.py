from __future__ import annotations

from dataclasses import replace

from forebay.families.mistral4.config import Mistral4Config
from forebay.layers.build import BlockSpec
from forebay.models.decoder import block_spec, layer_name
from forebay.models.families.parts.latent import latent_attention_spec, softmax_feed_forward
from forebay.models.families.parts.query_scale import scaled_by_position


def block(config: Mistral4Config, layer: int) -> BlockSpec:
    """Describe a layer: latent attention with scaled queries, and an MLP or experts."""
    attention = latent_attention_spec(config, f"{layer_name(layer)}.self_attn")
    attention = replace(attention, query_scale=scaled_by_position(config.query_scale))
    return block_spec(config, layer, attention, softmax_feed_forward(config, layer))
