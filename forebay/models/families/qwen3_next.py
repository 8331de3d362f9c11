from __future__ import annotations

from dataclasses import replace

from forebay.families.qwen3_next.config import Qwen3NextConfig
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.draft_head import DraftHeadSpec
from forebay.layers.params import Rows, rows_of_blocks
from forebay.models.decoder import mlp_spec
from forebay.models.families.parts import gated_delta as qwen3_5
from forebay.models.families.parts.gated_delta import delta_spec, qwen_block, qwen_draft_head, with_draft_layer
from forebay.models.families.parts.shared_experts import experts_and_shared

DECODER = qwen3_5.DECODER


def block(config: Qwen3NextConfig, layer: int) -> BlockSpec:
    """Describe a layer: Qwen3.5's, whose checkpoint joins the delta rule's inputs in two matrices."""
    joined = 2 * config.delta.key_size + 2 * config.delta.value_size
    inputs = (("in_proj_qkvz", joined), ("in_proj_ba", 2 * config.delta.num_value_heads))
    delta = delta_spec(config, layer, inputs, _by_kind(config, joined))
    return qwen_block(config, layer, delta=delta, mlp=_mlp(config, layer))


def draft_head(config: Qwen3NextConfig) -> DraftHeadSpec:
    """With experts, whatever other layers have."""
    whole = replace(with_draft_layer(config), expert_layers=(*config.expert_layers, config.num_layers))
    return qwen_draft_head(config, block(whole, config.num_layers))


def _by_kind(config: Qwen3NextConfig, joined: int) -> Rows:
    """Return the rows in the order that layers need. Of each key head `in_proj_qkvz` has q, k, v and the gate of its
    value heads, and `in_proj_ba`, whose rows begin at `joined`, their beta and decay; wanted is q of all heads, then k
    of all, and so on."""
    delta = config.delta
    heads, key, group = delta.num_key_heads, delta.key_head_dim, delta.num_value_heads // delta.num_key_heads
    value = group * delta.value_head_dim

    def of_each(first: int, size: int) -> Rows:
        return rows_of_blocks(count=heads, block=2 * key + 2 * value, first=first, size=size)

    betas, decays = (
        rows_of_blocks(count=heads, block=2 * group, first=joined + first, size=group) for first in (0, group)
    )
    return (
        *of_each(0, key),
        *of_each(key, key),
        *of_each(2 * key, value),
        *of_each(2 * key + value, value),
        *betas,
        *decays,
    )


def _mlp(config: Qwen3NextConfig, layer: int) -> PartSpec:
    if layer not in config.expert_layers:
        return mlp_spec(config, layer)
    return experts_and_shared(config, layer, normalize=config.norm_topk_prob)
