from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from forebay.families.fields import MAX_LAYERS, Fields
from forebay.families.model_config import Experts, Family, ModelConfig
from forebay.families.qwen2.config import NO_WINDOW, asks_for_windows
from forebay.families.shape import Shape
from forebay.families.tensor_names import TensorNames
from forebay.families.transformer import Defaults, Windows, experts, transformer


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3MoeConfig(ModelConfig):
    """A configuration with experts, and the numbers of the layers that have them."""

    experts: Experts
    expert_layers: tuple[int, ...]
    norm_topk_prob: bool


def parse(fields: Fields) -> Qwen3MoeConfig:
    """Read the fields of Qwen3's mixture, under either name of the number of experts."""
    return Qwen3MoeConfig(
        **transformer(fields, Defaults(), windows=Windows(listed=False) if asks_for_windows(fields) else None),
        # transformers 5 writes num_local_experts and reads both.
        experts=experts(fields, name="num_experts" if fields.has("num_experts") else "num_local_experts"),
        expert_layers=expert_layers(fields),
        norm_topk_prob=fields.flag("norm_topk_prob", default=False),
    )


def expert_layers(fields: Fields) -> tuple[int, ...]:
    """Return the layers with experts: every `decoder_sparse_step`-th, without those of `mlp_only_layers`."""
    step = fields.size("decoder_sparse_step", default=1)
    dense = fields.ints("mlp_only_layers", default=[])
    num_layers = fields.size("num_hidden_layers", most=MAX_LAYERS)
    return tuple(layer for layer in range(num_layers) if (layer + 1) % step == 0 and layer not in dense)


# Those of Qwen 3 VL are stacked.
FAMILY: Final = Family(parse=parse, small=Shape.experts, harmless=NO_WINDOW, names=TensorNames(stacked_experts=True))
