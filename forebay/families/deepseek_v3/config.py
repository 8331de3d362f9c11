from __future__ import annotations

from typing import Final

from forebay.families.base.fields import Fields
from forebay.families.config.model_config import Family
from forebay.families.config.transformer import Defaults
from forebay.families.parts.experts import grouped_experts, mlp_layer_types
from forebay.families.parts.latent import HARMLESS, NAMES, LatentConfig, latent_attention, latent_transformer, small


def parse(fields: Fields) -> LatentConfig:
    """Read DeepSeek-V3's fields; transformers' defaults of all sizes, three dense layers and eight groups of
    experts."""
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    fields.only("moe_layer_freq", 1)
    latent = latent_attention(fields, q_rank=1536, interleaved=fields.flag("rope_interleave", default=True))
    values = latent_transformer(fields, Defaults(kv_heads=True), latent)
    fields.only("head_dim", values["head_dim"])
    return LatentConfig(
        **values,
        latent=latent,
        experts=grouped_experts(fields, number=256, scale=2.5, inner=2048, groups=8, best_groups=4),
        mlp_layer_types=mlp_layer_types(fields.without("mlp_layer_types"), values["num_layers"], dense=3),
    )


FAMILY: Final = Family(parse=parse, small=small, harmless=HARMLESS, names=NAMES)
