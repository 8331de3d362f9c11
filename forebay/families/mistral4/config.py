from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.rope import without_partial_rotary
from forebay.families.base.shape import Shape
from forebay.families.base.tensor_names import TensorNames
from forebay.families.config.model_config import Family
from forebay.families.config.transformer import Defaults
from forebay.families.parts.experts import grouped_experts, mlp_layer_types
from forebay.families.parts.latent import (
    HARMLESS,
    LatentConfig,
    latent_attention,
    latent_transformer,
)
from forebay.families.parts.latent import (
    small as small_experts,
)
from forebay.families.parts.query_scale import QueryScale, default_rope, query_scale, without_query_scale

_ROPE: Final = default_rope(theta=10_000.0, factor=128.0, length=8192)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mistral4Config(LatentConfig):
    """A configuration of latent attention with a scale of queries by their position."""

    query_scale: QueryScale


def parse(fields: Fields) -> Mistral4Config:
    """Read Mistral 4's fields; transformers' defaults of all sizes, and experts in every layer."""
    latent = latent_attention(
        fields, rank=256, q_rank=1024, nope_dim=64, interleaved=fields.flag("rope_interleave", default=True)
    )
    size = latent.nope_dim + latent.rope_dim
    fields.only("head_dim", size)
    share, whole = without_partial_rotary(fields, default=latent.rope_dim / size)
    if round(share * size) != latent.rope_dim:
        raise fields.wrong("rope_parameters", f"with a partial_rotary_factor of {latent.rope_dim} / {size}, or none")
    described, beta = without_query_scale(whole, _ROPE)
    values = latent_transformer(described, Defaults(kv_heads=True), latent)
    experts = grouped_experts(fields, number=128, per_token=4, scale=1.0, inner=2048)
    return Mistral4Config(
        **values,
        latent=latent,
        experts=experts,
        mlp_layer_types=mlp_layer_types(fields.without("mlp_layer_types"), values["num_layers"], dense=0),
        query_scale=query_scale(fields, beta, values["rope_scaling"]),
    )


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model: positions of 16 times the length that it was trained on."""
    sizes = {"head_dim": shape.head_dim + 16, "n_group": 1}
    return {**small_experts(shape), **sizes, "rope_parameters": {**_ROPE, "original_max_position_embeddings": 2048}}


FAMILY: Final = Family(parse=parse, small=small, harmless=HARMLESS, names=TensorNames(stacked_experts=True))
