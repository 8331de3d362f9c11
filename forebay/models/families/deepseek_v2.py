from __future__ import annotations

from forebay.families.parts.experts import DENSE
from forebay.families.parts.latent import LatentConfig
from forebay.layers.build import BlockSpec, PartSpec
from forebay.models.decoder import block_spec, layer_name, mlp_spec, router_spec
from forebay.models.families.parts.latent import latent_attention_spec, with_shared
from forebay.ops import Scoring


def block(config: LatentConfig, layer: int) -> BlockSpec:
    """Describe a layer: latent attention, and an MLP or experts."""
    attention = latent_attention_spec(config, f"{layer_name(layer)}.self_attn")
    return block_spec(config, layer, attention, _feed_forward(config, layer))


def _feed_forward(config: LatentConfig, layer: int) -> PartSpec:
    if config.mlp_layer_types[layer] == DENSE:
        return mlp_spec(config, layer)
    name, experts = f"{layer_name(layer)}.mlp", config.experts
    router = router_spec(
        config,
        experts,
        f"{name}.gate",
        Scoring.SOFTMAX,
        normalize=experts.normalize,
        scale=experts.scale,
        groups=experts.groups,
        best_groups=experts.best_groups,
        summed=experts.summed,
    )
    return with_shared(config, name, router)
