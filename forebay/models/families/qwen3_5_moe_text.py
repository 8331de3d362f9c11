from __future__ import annotations

from forebay.families.parts.shared_experts import Qwen35MoeConfig
from forebay.layers.build import BlockSpec
from forebay.layers.draft_head import DraftHeadSpec
from forebay.models.families.parts import gated_delta as dense
from forebay.models.families.parts.gated_delta import (
    delta_spec,
    qwen_block,
    qwen_draft_head,
    separate_inputs,
    with_draft_layer,
)
from forebay.models.families.parts.shared_experts import experts_and_shared

DECODER = dense.DECODER


def block(config: Qwen35MoeConfig, layer: int) -> BlockSpec:
    """Describe a layer: Qwen3.5's, with experts instead of an MLP."""
    delta = delta_spec(config, layer, separate_inputs(config))
    return qwen_block(config, layer, delta=delta, mlp=experts_and_shared(config, layer, normalize=True))


def draft_head(config: Qwen35MoeConfig) -> DraftHeadSpec:
    """Describe the layer behind the model's own that drafts tokens."""
    return qwen_draft_head(config, block(with_draft_layer(config), config.num_layers))
