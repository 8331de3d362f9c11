"""Experts and an MLP of all tokens behind a gate."""

from __future__ import annotations

from forebay.families.config.model_config import Experts, ModelConfig
from forebay.families.parts.shared_experts import Qwen35MoeConfig
from forebay.layers.build import PartSpec
from forebay.layers.mlp import MlpSpec
from forebay.layers.scalar_gate import ScalarGateSpec
from forebay.layers.sums import SumSpec
from forebay.models.decoder import layer_name, softmax_experts


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
