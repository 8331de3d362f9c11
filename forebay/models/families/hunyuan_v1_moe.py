from __future__ import annotations

from forebay.families.config.model_config import ModelConfig
from forebay.layers.build import BlockSpec
from forebay.layers.sums import SumSpec
from forebay.models.decoder import block_spec, layer_name, mlp_spec, softmax_experts
from forebay.models.families.parts.rotated_first import rotated_first


def block(config: ModelConfig, layer: int) -> BlockSpec:
    """Describe a layer: dense Hunyuan's, with experts beside the MLP."""
    assert config.experts is not None, "a mixture without experts"
    shared = mlp_spec(config, layer, name="mlp.shared_mlp")
    name = f"{layer_name(layer)}.mlp"
    routed = softmax_experts(config, config.experts, name, router="gate.wg", normalize=True)
    return block_spec(config, layer, rotated_first(config, layer), SumSpec(first=routed, second=shared))
