from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from forebay.families.fields import MAX_LAYERS, Fields
from forebay.families.mixers import Latent
from forebay.families.model_config import Experts, Family, ModelConfig
from forebay.families.shape import Shape
from forebay.families.tensor_names import TensorNames
from forebay.families.transformer import FULL, Defaults, transformer

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


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentConfig(GroupedConfig):
    """A configuration of latent attention, and of experts in groups."""

    latent: Latent


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


def latent_transformer(fields: Fields, defaults: Defaults, latent: Latent) -> dict[str, Any]:
    """As a plain transformer; the size of a head is that of its rotated part."""
    fields = fields.replaced(head_dim=latent.rope_dim, num_key_value_heads=None)
    return transformer(fields, defaults, layer_types=[FULL] * fields.size("num_hidden_layers", most=MAX_LAYERS))


def latent_attention(
    fields: Fields, *, q_rank: int, interleaved: bool, nope_dim: int = 128, value_dim: int = 128
) -> Latent:
    """Read the sizes of latent attention; the arguments are the type's defaults. A null as `q_lora_rank` means that
    queries come straight from the input."""
    no_q_rank = fields.is_null("q_lora_rank")
    return Latent(
        rank=fields.size("kv_lora_rank", default=512),
        q_rank=0 if no_q_rank else fields.size("q_lora_rank", default=q_rank),
        nope_dim=fields.size("qk_nope_head_dim", default=nope_dim),
        rope_dim=fields.size("qk_rope_head_dim", default=64),
        value_dim=fields.size("v_head_dim", default=value_dim),
        interleaved=interleaved,
    )


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


def small_latent(shape: Shape) -> dict[str, Any]:
    """Latent attention, and experts behind the first layer."""
    return {
        "q_lora_rank": 2 * shape.head_dim,
        "kv_lora_rank": 2 * shape.head_dim,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": shape.head_dim,
        "v_head_dim": shape.head_dim,
        "head_dim": 16,
        "num_key_value_heads": shape.num_heads,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": shape.hidden_size,
    }


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model, with eight experts in two groups."""
    routing = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1}
    return {**small_latent(shape), **routing}


# Remote code in published files is what transformers has by now; heads of latent attention have no keys of their own;
# layers' MLPs may be listed instead of counted.
HARMLESS: Final = frozenset({"auto_map", "num_key_value_heads", "qk_head_dim", "first_k_dense_replace"})
# The layer behind the last one, with what joins the embedding to a hidden state.
DRAFT_HEAD: Final = (("model.layers.{0}.", "model.layers.{0}."),)
NAMES: Final = TensorNames(stacked_experts=True, draft_layers=True, draft_head=DRAFT_HEAD)

FAMILY: Final = Family(parse=parse, small=small, harmless=HARMLESS, names=NAMES)
