from __future__ import annotations

from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.shape import Shape
from forebay.families.base.tensor_names import TensorNames
from forebay.families.config.model_config import Family
from forebay.families.parts import windows as exaone4
from forebay.families.parts.experts import SPARSE, GroupedConfig, grouped_experts, mlp_layer_types
from forebay.families.parts.windows import windowed_transformer

_NAMES_OF_EXPERTS: Final = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}


def parse(fields: Fields) -> GroupedConfig:
    """Read EXAONE 4's fields, and those of experts. The first layer has an MLP unless the file says otherwise."""
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    fields = fields.renamed(_NAMES_OF_EXPERTS)
    values = windowed_transformer(fields)
    kinds = mlp_layer_types(fields, values["num_layers"], dense=1)
    fields.only("is_moe_layer", [kind == SPARSE for kind in kinds])
    experts = grouped_experts(fields, number=64, scale=2.5, inner=1024, groups=1, best_groups=1)
    return GroupedConfig(**values, experts=experts, mlp_layer_types=kinds)


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model: EXAONE 4's windows, and eight experts behind the first layer."""
    return {**exaone4.small(shape), **shape.experts(), "num_shared_experts": 1}


# Older names of what other fields say.
_SAID: Final = frozenset({"first_k_dense_replace", "first_last_k_dense_replace"})
# The correction stands beside the router in files. What drafts, behind `mtp.`, is not served: transformers has no such.
_NAMES: Final = TensorNames(
    renamed=((r"\.mlp\.e_score_correction_bias$", ".mlp.gate.e_score_correction_bias"),),
    unused=("mtp.",),
    stacked_experts=True,
)

FAMILY: Final = Family(parse=parse, small=small, harmless=_SAID, names=_NAMES)
