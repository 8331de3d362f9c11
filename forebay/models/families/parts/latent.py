"""Latent attention, experts in groups, and the draft layer behind them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final, TypeVar

from forebay.families.config.model_config import ModelConfig
from forebay.families.config.transformer import FULL
from forebay.families.parts.experts import DENSE, SPARSE, GroupedConfig, GroupedExperts
from forebay.families.parts.latent import LatentConfig
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.draft_head import DraftHeadSpec
from forebay.layers.latent_attention import LatentAttentionSpec
from forebay.layers.mlp import GATE_UP_DOWN, MlpSpec, MoeSpec
from forebay.layers.routing import RouterSpec
from forebay.layers.sums import SumSpec
from forebay.models.decoder import block_spec, draft_head_spec, layer_name, mlp_spec, rope_spec, router_spec
from forebay.ops import Scoring

Config = TypeVar("Config", bound=GroupedConfig)
_EPSILON: Final = 1e-20
CORRECTION: Final = "gate.e_score_correction_bias"


def block(config: LatentConfig, layer: int) -> BlockSpec:
    """Describe a layer: latent attention, and an MLP or experts."""
    attention = latent_attention_spec(config, f"{layer_name(layer)}.self_attn")
    return block_spec(config, layer, attention, feed_forward(config, layer))


def draft_head(config: LatentConfig) -> DraftHeadSpec:
    """Describe the layer behind the model's own that drafts tokens."""
    return draft_head_spec(config, block(with_draft_layer(config), config.num_layers))


def with_draft_layer(config: Config) -> Config:
    """With the draft head's layer behind the model's own, which has full attention and experts."""
    layers, mlps = (*config.layer_types, FULL), (*config.mlp_layer_types, SPARSE)
    return replace(config, layer_types=layers, mlp_layer_types=mlps)


def latent_attention_spec(config: LatentConfig, name: str) -> LatentAttentionSpec:
    """Describe the latent attention of the checkpoint's part `name`."""
    return LatentAttentionSpec(
        name=name,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        latent=config.latent,
        scale=_scale(config),
        rope=rope_spec(config),
        bias=config.attention_bias,
    )


def _scale(config: LatentConfig) -> float:
    """A rope whose `mscale_all_dim` is named has the amplitude that YaRN wants in the scores, not in the angles' table:
    arXiv 2309.00071, section 3.4, once for queries and once for keys."""
    scale = 1 / math.sqrt(config.latent.nope_dim + config.latent.rope_dim)
    scaling = config.rope_scaling
    if scaling is None or "mscale_all_dim" not in scaling or scaling["factor"] <= 1:
        return scale
    amplitude: float = 0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1.0
    return scale * amplitude * amplitude


def feed_forward(
    config: GroupedConfig,
    layer: int,
    *,
    router: str = "gate",
    correction: str = CORRECTION,
    shared: str = "shared_experts",
    expert_names: tuple[str, str, str] = GATE_UP_DOWN,
    limit: float = 0.0,
) -> PartSpec:
    """An MLP, or experts beside a shared one; the names are the checkpoint's, behind `mlp.` and an expert's number.
    `limit` as in `MlpSpec`, of all of them."""
    if config.mlp_layer_types[layer] == DENSE:
        return replace(mlp_spec(config, layer), limit=limit)
    name = f"{layer_name(layer)}.mlp"
    gate = grouped_router(config, config.experts, name, router=router, correction=correction)
    return with_shared(config, name, gate, expert_names, shared=shared, limit=limit)


def softmax_feed_forward(config: GroupedConfig, layer: int) -> PartSpec:
    """Describe an MLP, or experts that are scored by a softmax beside a shared one."""
    if config.mlp_layer_types[layer] == DENSE:
        return mlp_spec(config, layer)
    name = f"{layer_name(layer)}.mlp"
    router = grouped_router(config, config.experts, name, correction="", scoring=Scoring.SOFTMAX)
    return with_shared(config, name, router)


def with_shared(
    config: GroupedConfig,
    name: str,
    router: RouterSpec,
    expert_names: tuple[str, str, str] = GATE_UP_DOWN,
    *,
    shared: str = "shared_experts",
    limit: float = 0.0,
) -> PartSpec:
    """Describe the experts of the checkpoint's part `name` beside a shared one."""
    experts = config.experts
    inner = experts.intermediate_size
    routed = MoeSpec(name=name, router=router, intermediate_size=inner, names=expert_names, limit=limit)
    beside = MlpSpec(
        name=f"{name}.{shared}",
        hidden_size=config.hidden_size,
        intermediate_size=experts.shared_size,
        bias=config.mlp_bias,
        limit=limit,
    )
    return SumSpec(first=routed, second=beside)


def grouped_router(
    config: ModelConfig,
    experts: GroupedExperts,
    name: str,
    *,
    router: str = "gate",
    correction: str = CORRECTION,
    scoring: Scoring = Scoring.SIGMOID,
) -> RouterSpec:
    """`name` is the checkpoint's prefix of the experts, of `router` and of the correction, "" for none."""
    return router_spec(
        config,
        experts,
        f"{name}.{router}",
        scoring,
        normalize=experts.normalize,
        epsilon=_EPSILON,
        scale=experts.scale,
        groups=experts.groups,
        best_groups=experts.best_groups,
        summed=experts.summed,
        correction=f"{name}.{correction}" if correction else "",
    )
