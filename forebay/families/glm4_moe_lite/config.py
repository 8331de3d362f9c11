from __future__ import annotations

from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.shape import Shape
from forebay.families.config.model_config import Family
from forebay.families.config.transformer import Defaults
from forebay.families.parts.experts import grouped_experts, mlp_layer_types
from forebay.families.parts.latent import (
    HARMLESS,
    NAMES,
    LatentConfig,
    latent_attention,
    latent_transformer,
    small_latent,
)


def parse(fields: Fields) -> LatentConfig:
    """Read the fields of GLM 4.7 Flash: DeepSeek-V3's, with other defaults of the sizes."""
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    fields.only("moe_layer_freq", 1)
    interleaved = fields.flag("rope_interleave", default=True)
    latent = latent_attention(fields, q_rank=768, interleaved=interleaved, nope_dim=192, value_dim=256)
    values = latent_transformer(fields, Defaults(kv_heads=True, rms_norm_eps=1e-5), latent)
    fields.only("head_dim", values["head_dim"])
    return LatentConfig(
        **values,
        latent=latent,
        experts=grouped_experts(fields, number=64, scale=1.8, inner=1536, per_token=4),
        mlp_layer_types=mlp_layer_types(fields, values["num_layers"], dense=1),
    )


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model, with eight experts behind the first layer."""
    return {**small_latent(shape), "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}


FAMILY: Final = Family(parse=parse, small=small, harmless=HARMLESS, names=NAMES)
