from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.rope import rotary_dim, without_partial_rotary
from forebay.families.base.shape import Shape
from forebay.families.config.model_config import Family
from forebay.families.config.transformer import Defaults, transformer
from forebay.families.parts.experts import GroupedConfig, grouped_experts, mlp_layer_types, small_experts
from forebay.families.parts.latent import NAMES


@dataclass(frozen=True, kw_only=True, slots=True)
class Glm4MoeConfig(GroupedConfig):
    """`rotary_dim`: how many dimensions of a head, the first ones, are rotated. `qk_norm`: queries and keys are normed
    by heads."""

    rotary_dim: int
    qk_norm: bool


def parse(fields: Fields) -> Glm4MoeConfig:
    """Read the fields of GLM's mixtures: half of each head is rotated by default, and the first layer has an MLP."""
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    share, whole = without_partial_rotary(fields, default=0.5)
    values = transformer(whole, Defaults(rms_norm_eps=1e-5))
    return Glm4MoeConfig(
        **values,
        experts=grouped_experts(fields, number=128, scale=1.0, inner=1408),
        mlp_layer_types=mlp_layer_types(fields.without("mlp_layer_types"), values["num_layers"], dense=1),
        rotary_dim=rotary_dim(fields, values["head_dim"], share),
        qk_norm=fields.flag("use_qk_norm", default=False),
    )


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model: experts behind the first layer, biases and norms of q and k."""
    return {**small_experts(shape), "first_k_dense_replace": 1, "attention_bias": True, "use_qk_norm": True}


FAMILY: Final = Family(parse=parse, small=small, names=NAMES)
