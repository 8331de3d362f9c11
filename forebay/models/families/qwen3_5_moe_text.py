from __future__ import annotations

from forebay.families.model_config import Experts, ModelConfig
from forebay.families.qwen3_5_moe_text.config import Qwen35MoeConfig
from forebay.layers.build import BlockSpec, PartSpec
from forebay.layers.draft_head import DraftHeadSpec
from forebay.layers.mlp import MlpSpec
from forebay.layers.scalar_gate import ScalarGateSpec
from forebay.layers.sums import SumSpec
from forebay.models.decoder import layer_name, softmax_experts
from forebay.models.families import qwen3_5_text as dense
from forebay.models.families.qwen3_5_text import (
    delta_spec,
    qwen_block,
    qwen_draft_head,
    separate_inputs,
    with_draft_layer,
)

DECODER = dense.DECODER


def block(config: Qwen35MoeConfig, layer: int) -> BlockSpec:
    """Describe a layer: Qwen3.5's, with experts instead of an MLP."""
    delta = delta_spec(config, layer, separate_inputs(config))
    return qwen_block(config, layer, delta=delta, mlp=experts_and_shared(config, layer, normalize=True))


def draft_head(config: Qwen35MoeConfig) -> DraftHeadSpec:
    """Describe the layer behind the model's own that drafts tokens."""
    return qwen_draft_head(config, block(with_draft_layer(config), config.num_layers))


def experts_and_shared(config: Qwen35MoeConfig, layer: int, *, normalize: bool) -> PartSpec:
    """Describe the experts of a configuration of Qwen3.5's kind."""
    shared_size = config.shared_intermediate_size
    return qwen_experts(config, layer, config.experts, shared_size=shared_size, normalize=normalize)


def qwen_experts(config: ModelConfig, layer: int, experts: Experts, *, shared_size: int, normalize: bool) -> PartSpec:
    """Describe experts and the shared one, which a sigmoid of the input scales."""
    name = f"{layer_name(layer)}.mlp"
    shared = MlpSpec(
        name=f"{name}.shared_expert",
        hidden_size=config.hidden_size,
        intermediate_size=shared_size,
    )
    return SumSpec(
        first=softmax_experts(config, experts, name, router="gate", normalize=normalize),
        second=ScalarGateSpec(gate=f"{name}.shared_expert_gate", part=shared, hidden_size=config.hidden_size),
    )
