from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.shape import Shape
from forebay.families.base.tensor_names import TensorNames
from forebay.families.config.model_config import Experts, Family, ModelConfig
from forebay.families.config.transformer import Defaults, transformer


@dataclass(frozen=True, kw_only=True, slots=True)
class OlmoeConfig(ModelConfig):
    """A configuration with experts in every layer; `norm_topk_prob`: whether a token's weights of them sum to 1."""

    experts: Experts
    norm_topk_prob: bool


def parse(fields: Fields) -> OlmoeConfig:
    """Read OLMoE's fields: 64 experts of the size of an MLP by default. No published file clips q, k and v."""
    values = transformer(fields, Defaults(kv_heads=True, rms_norm_eps=1e-5))
    number = fields.size("num_experts", default=64)
    return OlmoeConfig(
        **values,
        experts=Experts(
            num_experts=number,
            per_token=fields.size("num_experts_per_tok", default=8, most=number),
            intermediate_size=values["intermediate_size"],
        ),
        norm_topk_prob=fields.flag("norm_topk_prob", default=False),
    )


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model, with eight experts."""
    return {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": shape.hidden_size}


FAMILY: Final = Family(parse=parse, small=small, names=TensorNames(stacked_experts=True))
