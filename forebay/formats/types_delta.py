"""Models with gated delta nets or latent attention: Qwen3-Next, Qwen3.5 (dense and with experts), DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from forebay.formats.config_fields import Fields
from forebay.formats.model_type import FULL, ModelType, parse_transformer
from forebay.formats.rope_config import without_partial_rotary
from forebay.formats.tensor_names import TensorNames

LINEAR: Final = "linear_attention"

_MAX_LAYERS: Final = 4096
_MAX_WIDTH: Final = 8  # the native convolution's

# How Qwen's rope shares its dimensions among the axes of a picture: all axes of a text have the same position.
_PICTURE_AXES: Final = ("mrope_section", "mrope_interleaved")


def _parse_qwen3_5(kind: ModelType, fields: Fields) -> dict[str, Any]:
    values = _gated_transformer(kind, fields)
    values["extra"] |= _delta_net(fields, key_heads=16, value_heads=32, key_size=128, value_size=128)
    return values


def _parse_qwen3_5_moe(kind: ModelType, fields: Fields) -> dict[str, Any]:
    # Every layer has experts: there is no other feed-forward layer to have a size.
    inner = fields.size("moe_intermediate_size", default=512)
    values = _parse_qwen3_5(kind, Fields({"intermediate_size": inner, **fields.raw}, fields.where))
    values["extra"] |= _qwen_experts(fields, num_experts=256, per_tok=8)
    return values


def _parse_qwen3_next(kind: ModelType, fields: Fields) -> dict[str, Any]:
    values = _parse_qwen3_5(kind, fields)
    values["extra"] |= {
        **_qwen_experts(fields, num_experts=512, per_tok=10),
        "norm_topk_prob": fields.flag("norm_topk_prob", default=True),
        "decoder_sparse_step": fields.size("decoder_sparse_step", default=1),
        "mlp_only_layers": fields.ints("mlp_only_layers", default=[]),
    }
    return values


def _gated_transformer(kind: ModelType, fields: Fields) -> dict[str, Any]:
    """As a plain transformer, but for the layers' types and the share of a head that is rotated."""
    share, raw = without_partial_rotary(fields.raw, fields.where, default=0.25, ignored=_PICTURE_AXES)
    values = parse_transformer(kind, _without(Fields(raw, fields.where), "layer_types"))
    rotary_dim = int(values["head_dim"] * share)
    if rotary_dim < 2 or rotary_dim % 2:
        raise fields.wrong("partial_rotary_factor", f"an even share of a head's {values['head_dim']} dimensions")
    interval = fields.size("full_attention_interval", default=4)
    computed = [LINEAR if (i + 1) % interval else FULL for i in range(values["num_layers"])]
    values["extra"] |= {"rotary_dim": rotary_dim, "layer_types": _layer_types(fields, computed)}
    return values


def _qwen_experts(fields: Fields, *, num_experts: int, per_tok: int) -> dict[str, Any]:
    num_experts = fields.size("num_experts", default=num_experts)
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": fields.size("num_experts_per_tok", default=per_tok, most=num_experts),
        "moe_intermediate_size": fields.size("moe_intermediate_size", default=512),
        "shared_expert_intermediate_size": fields.size("shared_expert_intermediate_size", default=512),
    }


def _parse_deepseek_v3(kind: ModelType, fields: Fields) -> dict[str, Any]:
    _only(fields, "scoring_func", "sigmoid")
    _only(fields, "topk_method", "noaux_tc")
    _only(fields, "moe_layer_freq", 1)
    values = _latent_transformer(kind, fields)
    dense = 3 if fields.raw.get("first_k_dense_replace") is None else fields.size("first_k_dense_replace", default=0)
    values["extra"] |= {
        **_latent_attention(fields, q_rank=1536),
        **_grouped_experts(fields, num_experts=256, scale=2.5, inner=2048, groups=8, best_groups=4),
        "rope_interleave": fields.flag("rope_interleave", default=True),
        "mlp_layer_types": ["dense" if i < dense else "sparse" for i in range(values["num_layers"])],
    }
    return values


def _latent_transformer(kind: ModelType, fields: Fields) -> dict[str, Any]:
    """As a plain transformer, whose heads have no size of their own but that of what is rotated."""
    size = fields.size("qk_rope_head_dim", default=64)
    renamed = {"head_dim": size, "num_key_value_heads": None}
    values = parse_transformer(kind, Fields({**_without(fields, "layer_types").raw, **renamed}, fields.where))
    values["extra"]["qk_rope_head_dim"] = size
    return values


def _latent_attention(fields: Fields, *, q_rank: int) -> dict[str, Any]:
    no_q_rank = "q_lora_rank" in fields.raw and fields.raw["q_lora_rank"] is None
    return {
        "q_lora_rank": 0 if no_q_rank else fields.size("q_lora_rank", default=q_rank),
        "kv_lora_rank": fields.size("kv_lora_rank", default=512),
        "qk_nope_head_dim": fields.size("qk_nope_head_dim", default=128),
        "v_head_dim": fields.size("v_head_dim", default=128),
    }


def _grouped_experts(
    fields: Fields, *, num_experts: int, scale: float, inner: int, groups: int, best_groups: int
) -> dict[str, Any]:
    """In DeepSeek's names, of experts that are chosen from the best groups of them."""
    num_experts = fields.size("n_routed_experts", default=num_experts)
    groups = fields.size("n_group", default=groups)
    if num_experts % groups or (groups > 1 and num_experts < 2 * groups):
        raise fields.wrong("n_group", f"a divisor of {num_experts} experts that leaves two in a group")
    best_groups = fields.size("topk_group", default=best_groups, most=groups)
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": fields.size("num_experts_per_tok", default=8, most=num_experts // groups * best_groups),
        "moe_intermediate_size": fields.size("moe_intermediate_size", default=inner),
        "n_shared_experts": fields.size("n_shared_experts", default=1),
        "n_group": groups,
        "topk_group": best_groups,
        "norm_topk_prob": fields.flag("norm_topk_prob", default=True),
        "routed_scaling_factor": fields.number("routed_scaling_factor", default=scale),
    }


def _only(fields: Fields, name: str, value: Any) -> None:
    if fields.raw.get(name) not in (None, value):
        raise fields.wrong(name, str(value))


def _layer_types(fields: Fields, computed: Sequence[str]) -> list[str]:
    given = fields.raw.get("layer_types")
    types = list(computed) if given is None else given
    if not isinstance(types, list) or len(types) != len(computed) or any(item not in (LINEAR, FULL) for item in types):
        raise fields.wrong("layer_types", f"{len(computed)} of {LINEAR} or {FULL}")
    return types


def _delta_net(fields: Fields, *, key_heads: int, value_heads: int, key_size: int, value_size: int) -> dict[str, Any]:
    key_heads = fields.size("linear_num_key_heads", default=key_heads)
    value_heads = fields.size("linear_num_value_heads", default=value_heads)
    if value_heads % key_heads:
        raise fields.wrong("linear_num_value_heads", f"a multiple of linear_num_key_heads, {key_heads}")
    return {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": fields.size("linear_key_head_dim", default=key_size),
        "linear_value_head_dim": fields.size("linear_value_head_dim", default=value_size),
        "linear_conv_kernel_dim": _width(fields, "linear_conv_kernel_dim"),
    }


def _width(fields: Fields, name: str) -> int:
    width = fields.size(name, default=4, most=_MAX_WIDTH)
    if width < 2:
        raise fields.wrong(name, "at least 2: a convolution over one token keeps nothing")
    return width


def _without(fields: Fields, *names: str) -> Fields:
    return Fields({name: value for name, value in fields.raw.items() if name not in names}, fields.where)


# What drafts tokens (`mtp.`) is not served.
_QWEN_NAMES: Final = TensorNames(
    renamed=((r"^model\.language_model\.", "model."),), unused=("model.visual.", "mtp."), stacked_experts=True
)

# Remote code in published files is what transformers has by now.
_NOT_RUN: Final = frozenset({"auto_map"})

TYPES: Final[Mapping[str, ModelType]] = {
    "qwen3_5_text": ModelType(head_dim=256, parse=_parse_qwen3_5, names=_QWEN_NAMES),
    "qwen3_next": ModelType(head_dim=256, parse=_parse_qwen3_next, names=_QWEN_NAMES),
    "qwen3_5_moe_text": ModelType(head_dim=256, parse=_parse_qwen3_5_moe, names=_QWEN_NAMES),
    "deepseek_v3": ModelType(
        kv_heads_default=True,
        honours=_NOT_RUN,
        parse=_parse_deepseek_v3,
        names=TensorNames(stacked_experts=True, draft_layers=True),
    ),
}
