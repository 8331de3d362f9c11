from __future__ import annotations

from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.shape import Shape
from forebay.families.base.tensor_names import TensorNames
from forebay.families.config.model_config import Family
from forebay.families.config.transformer import Defaults
from forebay.families.parts.experts import grouped_experts, mlp_layer_types
from forebay.families.parts.latent import HARMLESS, LatentConfig, latent_attention, latent_transformer, small_latent

_GREEDY: Final = "greedy"
_IN_GROUPS: Final = "group_limited_greedy"


def parse(fields: Fields) -> LatentConfig:
    """Read DeepSeek-V2's fields; transformers' defaults of all sizes, no dense layers and no groups of experts."""
    fields.only("scoring_func", "softmax")
    fields.only("topk_method", _GREEDY, _IN_GROUPS)
    fields.only("norm_topk_prob", False)  # transformers does not normalize, whatever the file says
    fields.only("mlp_bias", False)
    fields.only("moe_layer_freq", 1)
    if fields.get("topk_method", _GREEDY) == _GREEDY:
        fields = fields.dropped("n_group", "topk_group")
    latent = latent_attention(fields, q_rank=1536, interleaved=True)
    values = latent_transformer(fields, Defaults(kv_heads=True), latent)
    experts = grouped_experts(
        fields,
        number=64,
        scale=1.0,
        inner=1407,
        groups=1,
        best_groups=1,
        per_token=None,
        shared=2,
        normalize=False,
        summed=1,
    )
    dense = mlp_layer_types(fields.without("mlp_layer_types"), values["num_layers"], dense=0)
    return LatentConfig(**values, latent=latent, experts=experts, mlp_layer_types=dense)


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model, with eight experts in four groups."""
    groups = {"topk_method": _IN_GROUPS, "n_group": 4, "topk_group": 2}
    return {**small_latent(shape), "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, **groups}


FAMILY: Final = Family(
    parse=parse, small=small, harmless=HARMLESS | {"head_dim"}, names=TensorNames(stacked_experts=True)
)
