from __future__ import annotations

from dataclasses import replace

from forebay.families.lfm3.config import Lfm3Config
from forebay.families.parts.convolution import CONV
from forebay.layers.attention import QkNorm
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.rotary import RopeSpec
from forebay.models.decoder import attention_spec, block_spec
from forebay.models.families.parts import convolution as lfm2
from forebay.models.families.parts.convolution import NORMS, conv_spec, dense_mlp

DECODER = lfm2.DECODER


def block(config: Lfm3Config, layer: int) -> BlockSpec:
    """Describe a layer: a short convolution or attention with gated heads, and an MLP."""
    after = ("post_operator_norm", "post_ffn_norm") if config.use_sandwich_norm else (None, None)
    return block_spec(config, layer, _mixer(config, layer), dense_mlp(config, layer), before=NORMS, after=after)


def _mixer(config: Lfm3Config, layer: int) -> PartSpec:
    kind = config.layer_types[layer]
    if kind == CONV:
        return conv_spec(config, layer)
    return replace(
        attention_spec(config, layer, qk_norm=QkNorm.HEAD),
        rope=RopeSpec(config.head_dim, *config.ropes[kind]),
        head_gate=config.use_attention_gate,
    )
