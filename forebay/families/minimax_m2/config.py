from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.rope import rotary_dim, without_partial_rotary
from forebay.families.base.shape import Shape
from forebay.families.config.model_config import Family
from forebay.families.config.transformer import Defaults, transformer
from forebay.families.parts.wide_experts import NAMES, MixtralConfig, wide_experts

# Published files have these values; MiniMax-M1 has others.
_FIXED: Final[dict[str, Any]] = {
    "scoring_func": "sigmoid",
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "use_routing_bias": True,
    "shared_intermediate_size": 0,
}
# Remote code that transformers has by now, values of parts that only M1 has, and layers for drafting, which are not
# served.
_HARMLESS: Final = frozenset({
    "auto_map", "layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta",
    "mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules", "shared_moe_mode", "use_mtp",
})  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class MiniMaxM2Config(MixtralConfig):
    """`rotary_dim`: how many dimensions of a head, the first ones, are rotated."""

    rotary_dim: int


def parse(fields: Fields) -> MiniMaxM2Config:
    """Read MiniMax-M2's fields: 256 experts of the size of an MLP, heads rotated in their first `rotary_dim`
    dimensions."""
    for name, value in _FIXED.items():
        fields.only(name, value)
    _check_attention(fields)
    head_dim = fields.size("head_dim", default=128)
    rotated = fields.size("rotary_dim", default=head_dim, most=head_dim)
    share, whole = without_partial_rotary(fields, default=rotated / head_dim)
    values = transformer(whole, Defaults(head_dim=128, rope_theta=5e6, attention_bias=False))
    return MiniMaxM2Config(
        **values,
        experts=wide_experts(fields, values["intermediate_size"], number=256, per_token=8),
        rotary_dim=rotary_dim(fields, head_dim, share),
    )


def _check_attention(fields: Fields) -> None:
    """Raise ModelError for a list of the layers' kinds of attention that has another one than 1, full attention."""
    kinds = fields.get("attn_type_list", [])
    if not isinstance(kinds, list) or any(kind != 1 for kind in kinds):
        raise fields.wrong("attn_type_list", "a list of ones, for full attention")


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model, with half of each head rotated and eight experts."""
    own = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": shape.hidden_size}
    return {**own, "rotary_dim": shape.head_dim // 2}


FAMILY: Final = Family(parse=parse, small=small, harmless=_HARMLESS, names=replace(NAMES, draft_layers=True))
