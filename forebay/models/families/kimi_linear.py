from __future__ import annotations

from dataclasses import replace

from forebay.families.config.transformer import FULL
from forebay.families.parts.kimi_delta import KimiLinearConfig
from forebay.layers.build import BlockSpec, PartSpec
from forebay.models.decoder import block_spec, layer_name
from forebay.models.families.parts.kimi_delta import kimi_delta_spec
from forebay.models.families.parts.latent import feed_forward, latent_attention_spec

_EXPERT_NAMES = ("w1", "w3", "w2")  # gate, up and down


def block(config: KimiLinearConfig, layer: int) -> BlockSpec:
    """Describe a layer: a delta rule or latent attention, and an MLP or experts."""
    return block_spec(config, layer, _mixer(config, layer), feed_forward(config, layer, expert_names=_EXPERT_NAMES))


def _mixer(config: KimiLinearConfig, layer: int) -> PartSpec:
    name = f"{layer_name(layer)}.self_attn"
    if config.layer_types[layer] == FULL:
        return replace(latent_attention_spec(config, name), rope=None)
    return kimi_delta_spec(config, name, low_rank=True, a_log_shape=(1, 1, config.delta.num_heads, 1))
