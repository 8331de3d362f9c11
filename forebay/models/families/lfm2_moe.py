from __future__ import annotations

from forebay.families.lfm2_moe.config import Lfm2MoeConfig
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.mlp import MoeSpec
from forebay.models.decoder import layer_name, router_spec
from forebay.models.families.parts import convolution as lfm2
from forebay.models.families.parts.convolution import GATE_UP_DOWN, dense_mlp, lfm2_block
from forebay.ops import Scoring

DECODER = lfm2.DECODER
_EPSILON = 1e-6


def block(config: Lfm2MoeConfig, layer: int) -> BlockSpec:
    """Describe a layer: a short convolution or attention, and an MLP or experts."""
    return lfm2_block(config, layer, _mlp(config, layer))


def _mlp(config: Lfm2MoeConfig, layer: int) -> PartSpec:
    if layer < config.num_dense_layers:
        return dense_mlp(config, layer)
    name, experts = f"{layer_name(layer)}.feed_forward", config.experts
    router = router_spec(
        config,
        experts,
        f"{name}.gate",
        Scoring.SIGMOID,
        normalize=config.norm_topk_prob,
        epsilon=_EPSILON,
        scale=config.routed_scaling_factor,
        correction=f"{name}.expert_bias" if config.use_expert_bias else "",
    )
    return MoeSpec(name=name, router=router, intermediate_size=experts.intermediate_size, names=GATE_UP_DOWN)
