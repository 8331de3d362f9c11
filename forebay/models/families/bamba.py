from __future__ import annotations

from dataclasses import replace

from forebay.families.config.transformer import LINEAR
from forebay.families.parts.mamba2 import Mamba2Config
from forebay.layers.build import BlockSpec, PartSpec
from forebay.models.decoder import DecoderOptions, attention_spec, block_spec, layer_name, mlp_spec, rope_spec
from forebay.models.families.parts.mamba2 import mamba2_spec
from forebay.models.families.parts.mamba_names import FINAL_NORM, NORMS

DECODER: DecoderOptions = {"norm": FINAL_NORM}


def block(config: Mamba2Config, layer: int) -> BlockSpec:
    """Describe a layer: a Mamba-2 mixer or attention, and an MLP under the name `feed_forward`."""
    return block_spec(config, layer, _mixer(config, layer), mlp_spec(config, layer, name="feed_forward"), before=NORMS)


def _mixer(config: Mamba2Config, layer: int) -> PartSpec:
    if config.layer_types[layer] == LINEAR:
        return mamba2_spec(config, f"{layer_name(layer)}.mamba")
    return replace(attention_spec(config, layer), rope=replace(rope_spec(config), dim=config.head_dim // 2))
