from __future__ import annotations

from dataclasses import replace

from forebay.families.olmo3.config import Olmo3Config
from forebay.layers.attention import QkNorm
from forebay.layers.build import BlockSpec
from forebay.layers.rotary import RopeSpec
from forebay.models.decoder import attention_spec
from forebay.models.families.parts.norms_behind import norms_behind


def block(config: Olmo3Config, layer: int) -> BlockSpec:
    """Describe a layer: OLMo 2's, with the rope of its kind of attention."""
    rope = RopeSpec(config.head_dim, *config.ropes[config.layer_types[layer]])
    return norms_behind(config, layer, replace(attention_spec(config, layer, qk_norm=QkNorm.FULL), rope=rope))
