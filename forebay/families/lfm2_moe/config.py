from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.shape import Shape
from forebay.families.config.model_config import Experts, Family
from forebay.families.config.transformer import FULL, experts
from forebay.families.parts.convolution import CONV, LFM2_DEFAULTS, OLD_NAMES, Lfm2Config, convolutional


@dataclass(frozen=True, kw_only=True, slots=True)
class Lfm2MoeConfig(Lfm2Config):
    """A configuration with experts in all layers but the first `num_dense_layers`."""

    experts: Experts
    num_dense_layers: int
    use_expert_bias: bool
    norm_topk_prob: bool
    routed_scaling_factor: float


def parse(fields: Fields) -> Lfm2MoeConfig:
    """Read LFM2-MoE's fields: LFM2's, and experts with a sigmoid router."""
    fields = fields.renamed(OLD_NAMES)
    num_dense = 2 if fields.get("num_dense_layers") is None else fields.size("num_dense_layers", default=0)
    return Lfm2MoeConfig(
        **convolutional(fields, LFM2_DEFAULTS, None),
        experts=experts(fields, number=32, per_token=4, intermediate_size=1792),
        num_dense_layers=num_dense,
        use_expert_bias=fields.flag("use_expert_bias", default=True),
        norm_topk_prob=fields.flag("norm_topk_prob", default=True),
        routed_scaling_factor=fields.number("routed_scaling_factor", default=1.0),
    )


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model: one dense layer, and experts in the others."""
    return {**shape.experts(), "layer_types": shape.cycle(CONV, CONV, FULL), "num_dense_layers": 1}


FAMILY: Final = Family(parse=parse, small=small)
