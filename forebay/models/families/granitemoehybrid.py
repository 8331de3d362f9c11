from __future__ import annotations

from forebay.families.config.transformer import LINEAR
from forebay.families.granitemoehybrid.config import GraniteMoeHybridConfig
from forebay.layers.blocks import ResidualSpec
from forebay.layers.build import PartSpec
from forebay.models.decoder import DecoderSpec, block_spec, layer_name
from forebay.models.families.parts.mamba2 import mamba2_spec
from forebay.models.families.parts.multipliers import experts_and_shared, scaled, scaled_attention


def describe(config: GraniteMoeHybridConfig) -> DecoderSpec:
    """Describe the whole model, with Granite's constants."""
    return scaled(config, config.multipliers, lambda layer: _block(config, layer))


def _block(config: GraniteMoeHybridConfig, layer: int) -> ResidualSpec:
    feed_forward = experts_and_shared(config, layer, shared_size=config.shared_intermediate_size)
    return block_spec(config, layer, _mixer(config, layer), feed_forward)


def _mixer(config: GraniteMoeHybridConfig, layer: int) -> PartSpec:
    if config.layer_types[layer] == LINEAR:
        return mamba2_spec(config, f"{layer_name(layer)}.mamba")
    return scaled_attention(config, config.multipliers, layer, rope=config.has_rope)
