from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.shape import Shape
from forebay.families.base.tensor_names import TensorNames
from forebay.families.config.model_config import Family
from forebay.families.config.transformer import Defaults, Windows, experts, transformer
from forebay.families.parts.expert_layers import Qwen3MoeConfig, expert_layers
from forebay.families.parts.late_windows import NO_WINDOW, asks_for_windows


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen2MoeConfig(Qwen3MoeConfig):
    """Qwen3's configuration of experts, the size of the one that every token goes to, and whether q, k and v have
    biases."""

    shared_intermediate_size: int
    qkv_bias: bool


def parse(fields: Fields) -> Qwen2MoeConfig:
    """Read the fields of Qwen2's mixture: 60 experts by default, and a shared one."""
    return Qwen2MoeConfig(
        **transformer(fields, Defaults(attention_bias=False), windows=_windows(fields)),
        experts=experts(fields, number=60, per_token=4, intermediate_size=1408),
        expert_layers=expert_layers(fields),
        norm_topk_prob=fields.flag("norm_topk_prob", default=False),
        shared_intermediate_size=fields.size("shared_expert_intermediate_size", default=5632),
        qkv_bias=fields.flag("qkv_bias", default=True),
    )


def _windows(fields: Fields) -> Windows | None:
    """Every second layer of those before `max_window_layers` has a window, where windows are asked for."""

    def early(num_layers: int) -> range:
        return range(0, min(num_layers, fields.size("max_window_layers", default=28, least=0)), 2)

    return Windows(layers=early) if asks_for_windows(fields) else None


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model, with eight experts and a shared one."""
    return {**shape.experts(), "shared_expert_intermediate_size": shape.hidden_size}


FAMILY: Final = Family(parse=parse, small=small, harmless=NO_WINDOW, names=TensorNames(stacked_experts=True))
