from __future__ import annotations

from dataclasses import replace

from forebay.families.gpt_oss.config import GptOssConfig
from forebay.layers.build import BlockSpec
from forebay.layers.clamped_moe import ClampedMoeSpec
from forebay.models.decoder import attention_spec, block_spec, layer_name, router_spec
from forebay.ops import Scoring


def block(config: GptOssConfig, layer: int) -> BlockSpec:
    """Describe a layer: attention with sinks, and experts."""
    return block_spec(config, layer, replace(attention_spec(config, layer), sinks=True), _experts(config, layer))


def _experts(config: GptOssConfig, layer: int) -> ClampedMoeSpec:
    experts, name = config.experts, f"{layer_name(layer)}.mlp"
    return ClampedMoeSpec(
        name=f"{name}.experts",
        router=router_spec(config, experts, f"{name}.router", Scoring.SOFTMAX, bias=True, normalize=True),
        intermediate_size=experts.intermediate_size,
        alpha=config.swiglu_alpha,
        limit=config.swiglu_limit,
    )
