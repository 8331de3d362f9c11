from __future__ import annotations

from typing import Final

from forebay.families.base.fields import Fields
from forebay.families.base.tensor_names import TensorNames
from forebay.families.config.model_config import Family
from forebay.families.config.transformer import Defaults, transformer
from forebay.families.parts.experts import SPARSE, GroupedConfig, grouped_experts, small_experts


def parse(fields: Fields) -> GroupedConfig:
    """Read Solar Open's fields: those of GLM's mixtures, without dense layers, norms of q and k and partial
    rotation."""
    fields.only("first_k_dense_replace", 0)
    experts = grouped_experts(fields, number=128, scale=1.0, inner=1280)
    # Every layer has experts: there is no other feed-forward layer to have a size.
    whole = fields if fields.has("intermediate_size") else fields.replaced(intermediate_size=experts.intermediate_size)
    values = transformer(whole, Defaults(head_dim=128, rms_norm_eps=1e-5, rope_theta=1e6))
    return GroupedConfig(**values, experts=experts, mlp_layer_types=(SPARSE,) * values["num_layers"])


FAMILY: Final = Family(parse=parse, small=small_experts, names=TensorNames(stacked_experts=True))
