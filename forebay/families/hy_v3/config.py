from __future__ import annotations

from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.shape import Shape
from forebay.families.base.tensor_names import TensorNames
from forebay.families.config.model_config import Family
from forebay.families.config.transformer import Defaults, transformer
from forebay.families.parts.experts import GroupedConfig, GroupedExperts, mlp_layer_types
from forebay.families.parts.latent import DRAFT_HEAD

_FIXED: Final[dict[str, Any]] = {
    "moe_router_enable_expert_bias": True,
    "moe_router_use_sigmoid": True,
    "qk_norm": True,
    "route_norm": True,
}
# The precision of some sums, how experts are computed, and the first of the ids that end an answer.
_HARMLESS: Final = frozenset({
    "enable_attention_fp32_softmax", "enable_lm_head_fp32", "enable_moe_fp32_combine", "eod_token_id",
    "first_k_dense_replace", "use_grouped_mm",
})  # fmt: skip


def parse(fields: Fields) -> GroupedConfig:
    """Read Hy3's fields: 192 experts, whose weights are scaled by `router_scaling_factor`, beside a shared one."""
    for name, value in _FIXED.items():
        fields.only(name, value)
    values = transformer(fields, Defaults(head_dim=128, rms_norm_eps=1e-5, rope_theta=11_158_840.0, mlp_bias=True))
    number = fields.renamed({"num_local_experts": "num_experts"}).size("num_experts", default=192)
    inner = fields.size("moe_intermediate_size", default=1536)
    fields.only("expert_hidden_dim", inner)
    return GroupedConfig(
        **values,
        experts=GroupedExperts(
            num_experts=number,
            per_token=fields.size("num_experts_per_tok", default=8, most=number),
            intermediate_size=inner,
            groups=1,
            best_groups=1,
            shared_size=fields.size("num_shared_experts", default=1) * inner,
            normalize=True,
            scale=fields.number("router_scaling_factor", default=2.826),
        ),
        mlp_layer_types=mlp_layer_types(fields, values["num_layers"], dense=1),
    )


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model, with eight experts behind the first layer."""
    return shape.experts()


# Names of the hub's files take the place of transformers'.
_NAMES: Final = TensorNames(
    renamed=(
        (r"\.mlp\.gate\.weight$", ".mlp.router.gate.weight"),
        (r"\.mlp\.e_score_correction_bias$", ".mlp.expert_bias"),
        (r"\.mlp\.shared_experts\.", ".mlp.shared_mlp."),
    ),
    stacked_experts=True,
    draft_layers=True,
    draft_head=(("model.layers.{0}.final_layernorm.", "model.layers.{0}.shared_head.norm."), *DRAFT_HEAD),
)

FAMILY: Final = Family(parse=parse, small=small, harmless=_HARMLESS, names=_NAMES)
