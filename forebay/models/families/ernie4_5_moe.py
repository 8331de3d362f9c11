from __future__ import annotations

from dataclasses import replace

from forebay.families.ernie4_5_moe.config import Ernie45MoeConfig
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.mlp import MlpSpec, MoeSpec
from forebay.layers.sums import SumSpec
from forebay.models.decoder import attention_spec, block_spec, layer_name, mlp_spec, router_spec
from forebay.ops import Scoring


def block(config: Ernie45MoeConfig, layer: int) -> BlockSpec:
    """Describe a layer: ERNIE's attention, and an MLP or experts."""
    attention = replace(attention_spec(config, layer), interleaved=True)
    return block_spec(config, layer, attention, _feed_forward(config, layer))


def _feed_forward(config: Ernie45MoeConfig, layer: int) -> PartSpec:
    if layer not in config.expert_layers:
        return mlp_spec(config, layer)
    routed = _experts(config, f"{layer_name(layer)}.mlp")
    if not config.shared_size:
        return routed
    shared = MlpSpec(
        name=f"{routed.name}.shared_experts",
        hidden_size=config.hidden_size,
        intermediate_size=config.shared_size,
    )
    return SumSpec(first=routed, second=shared)


def _experts(config: Ernie45MoeConfig, name: str) -> MoeSpec:
    router = router_spec(
        config,
        config.experts,
        f"{name}.gate",
        Scoring.SOFTMAX,
        normalize=True,
        least_sum=config.norm_min,
        correction=f"{name}.moe_statics.e_score_correction_bias",
    )
    router = replace(router, correction_in_row=True)
    return MoeSpec(name=name, router=router, intermediate_size=config.experts.intermediate_size)
