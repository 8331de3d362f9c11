"""Layers with experts, by the fields of Qwen 3."""

from __future__ import annotations

from dataclasses import dataclass

from forebay.families.base.fields import MAX_LAYERS, Fields
from forebay.families.config.model_config import Experts, ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3MoeConfig(ModelConfig):
    """A configuration with experts, and the numbers of the layers that have them."""

    experts: Experts
    expert_layers: tuple[int, ...]
    norm_topk_prob: bool


def expert_layers(fields: Fields) -> tuple[int, ...]:
    """Return the layers with experts: every `decoder_sparse_step`-th, without those of `mlp_only_layers`."""
    step = fields.size("decoder_sparse_step", default=1)
    dense = fields.ints("mlp_only_layers", default=[])
    num_layers = fields.size("num_hidden_layers", most=MAX_LAYERS)
    return tuple(layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in dense)
