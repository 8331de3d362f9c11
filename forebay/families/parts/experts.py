"""Experts in groups, and the layers that have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.shape import Shape
from forebay.families.config.model_config import Experts, ModelConfig

DENSE: Final = "dense"
SPARSE: Final = "sparse"


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedExperts(Experts):
    """Experts in groups, of which the best are chosen by the sum of the `summed` best scores in a group. `shared_size`
    is the size of the MLP beside the experts; `normalize` and `scale` apply to their weights."""

    groups: int
    best_groups: int
    shared_size: int
    normalize: bool
    scale: float
    summed: int = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupedConfig(ModelConfig):
    """`mlp_layer_types`: `dense` or `sparse` for each layer."""

    experts: GroupedExperts
    mlp_layer_types: tuple[str, ...]


def grouped_experts(
    fields: Fields,
    *,
    number: int | None,
    scale: float,
    inner: int,
    groups: int = 1,
    best_groups: int = 1,
    per_token: int | None = 8,
    shared: int = 1,
    normalize: bool = True,
    summed: int = 2,
) -> GroupedExperts:
    """Read experts in groups, of which only the best are chosen from. The arguments are the type's defaults, None if
    its files must have the field. Raises ModelError for groups that do not divide the experts."""
    number = fields.size("n_routed_experts", default=number)
    groups = fields.size("n_group", default=groups)
    if number % groups or (groups > 1 and number < summed * groups):
        raise fields.wrong("n_group", f"a divisor of {number} experts that leaves {summed} in a group")
    best_groups = fields.size("topk_group", default=best_groups, most=groups)
    inner = fields.size("moe_intermediate_size", default=inner)
    return GroupedExperts(
        num_experts=number,
        per_token=fields.size("num_experts_per_tok", default=per_token, most=number // groups * best_groups),
        intermediate_size=inner,
        groups=groups,
        best_groups=best_groups,
        shared_size=fields.size("n_shared_experts", default=shared) * inner,
        normalize=fields.flag("norm_topk_prob", default=normalize),
        scale=fields.number("routed_scaling_factor", default=scale),
        summed=summed,
    )


def mlp_layer_types(fields: Fields, num_layers: int, *, dense: int) -> tuple[str, ...]:
    """Return the kind of MLP of each layer: an MLP in the first layers, experts in the others, unless the file lists
    them."""
    if fields.get("mlp_layer_types") is not None:
        return tuple(fields.one_of_each("mlp_layer_types", num_layers, (DENSE, SPARSE)))
    name = "first_k_dense_replace"
    dense = dense if fields.get(name) is None else fields.size(name, default=0)
    return tuple(DENSE if i < dense else SPARSE for i in range(num_layers))


def small_experts(shape: Shape) -> dict[str, Any]:
    """Return the fields of eight experts beside a shared one, two for each token."""
    inner = {"moe_intermediate_size": shape.hidden_size}
    return {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, **inner}
