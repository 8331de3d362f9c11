"""Models with delta rules or latent attention: Qwen3-Next, Qwen3.5 (dense and with experts), DeepSeek-V3, Kimi Linear,
Ling 3 (`bailing_hybrid`), OLMo hybrids."""

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
    values["extra"] |= {
        **_latent_attention(fields, q_rank=1536),
        **_grouped_experts(fields, num_experts=256, scale=2.5, inner=2048, groups=8, best_groups=4),
        "rope_interleave": fields.flag("rope_interleave", default=True),
        "mlp_layer_types": _mlp_layer_types(_without(fields, "mlp_layer_types"), values["num_layers"], dense=3),
    }
    return values


# What else than DeepSeek Kimi and Ling call a field.
_NAMES: Final = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}


def _parse_kimi_linear(kind: ModelType, fields: Fields) -> dict[str, Any]:
    fields = _renamed(fields, _NAMES)
    _only(fields, "moe_router_activation_func", "sigmoid")
    _only(fields, "moe_layer_freq", 1)
    _only(fields, "mla_use_nope", True)
    _only(fields, "tie_word_embeddings", False)
    values = _latent_transformer(kind, fields)
    own = fields.raw.get("linear_attn_config") or {}
    if not isinstance(own, dict):
        raise fields.wrong("linear_attn_config", "an object")
    own = _renamed(Fields(own, fields.where), _KIMI_LINEAR_NAMES).raw
    linear = Fields({**fields.raw, **own}, fields.where)
    values["extra"] |= {
        **_latent_attention(fields, q_rank=0),
        **_grouped_experts(fields, num_experts=256, scale=2.446, inner=1024, groups=1, best_groups=1),
        **_kimi_delta(linear, heads=32, head_dim=128),
        "rope_interleave": False,
        "layer_types": _layer_types(fields, _kimi_layers(linear, values["num_layers"])),
        "mlp_layer_types": _mlp_layer_types(fields, values["num_layers"], dense=1),
    }
    return values


_KIMI_LINEAR_NAMES: Final = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


def _kimi_layers(fields: Fields, num_layers: int) -> list[str]:
    """Files list the layers of both kinds, and count from 1."""
    if "full_attn_layers" not in fields.raw or "kda_layers" not in fields.raw:
        return [FULL if i and i % 4 == 0 else LINEAR for i in range(num_layers)]
    full, linear = fields.ints("full_attn_layers", default=[]), fields.ints("kda_layers", default=[])
    if sorted(full + linear) != list(range(1, num_layers + 1)):
        raise fields.wrong("kda_layers", f"those of layers 1 to {num_layers} that full_attn_layers does not have")
    return [FULL if i + 1 in full else LINEAR for i in range(num_layers)]


def _parse_bailing_hybrid(kind: ModelType, fields: Fields) -> dict[str, Any]:
    fields = _renamed(fields, _NAMES)
    _only(fields, "tie_word_embeddings", False)
    values = _latent_transformer(kind, fields)
    # Where it is not a file of the model's makers, head_dim is what is rotated, and these are there as well.
    heads, head_dim = values["num_heads"], fields.size("head_dim", default=128)
    own = {"linear_conv_kernel_dim": fields.raw.get("short_conv_kernel_size"), **fields.raw}
    group = fields.size("layer_group_size", default=6)
    computed = [LINEAR if (i + 1) % group else FULL for i in range(values["num_layers"])]
    bounded = fields.flag("kda_safe_gate", default=True)
    values["extra"] |= {
        **_latent_attention(_without(fields, "q_lora_rank"), q_rank=0),
        **_grouped_experts(fields, num_experts=512, scale=2.5, inner=768, groups=8, best_groups=4),
        **_kimi_delta(Fields(own, fields.where), heads=heads, head_dim=head_dim),
        "rope_interleave": True,
        "layer_types": _layer_types(fields, computed),
        "mlp_layer_types": _mlp_layer_types(fields, values["num_layers"], dense=2),
        "kda_lower_bound": _lower_bound(fields) if bounded else 0.0,
    }
    return values


def _lower_bound(fields: Fields) -> float:
    value = fields.raw.get("kda_lower_bound")
    bound = -5.0 if value is None else value
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not -1e3 < bound < 0:
        raise fields.wrong("kda_lower_bound", "a number below 0")
    return float(bound)


def _kimi_delta(fields: Fields, *, heads: int, head_dim: int) -> dict[str, Any]:
    return {
        "linear_num_heads": fields.size("linear_num_heads", default=heads),
        "linear_head_dim": fields.size("linear_head_dim", default=head_dim),
        "linear_conv_kernel_dim": _width(fields, "linear_conv_kernel_dim"),
    }


def _mlp_layer_types(fields: Fields, num_layers: int, *, dense: int) -> list[str]:
    """The first layers have an MLP, the others experts, where the file does not say it of each."""
    given = fields.raw.get("mlp_layer_types")
    if given is None:
        name = "first_k_dense_replace"
        dense = dense if fields.raw.get(name) is None else fields.size(name, default=0)
        return ["dense" if i < dense else "sparse" for i in range(num_layers)]
    if not isinstance(given, list) or len(given) != num_layers or any(i not in ("dense", "sparse") for i in given):
        raise fields.wrong("mlp_layer_types", f"{num_layers} of dense or sparse")
    return given


def _parse_olmo_hybrid(kind: ModelType, fields: Fields) -> dict[str, Any]:
    rope = fields.raw.get("rope_scaling") or fields.raw.get("rope_parameters") or {}
    theta = {**fields.raw, **rope}.get("rope_theta", kind.rope_theta) if isinstance(rope, dict) else kind.rope_theta
    values = parse_transformer(kind, _without(fields, "layer_types"))
    num_layers, heads, hidden_size = values["num_layers"], values["num_heads"], values["hidden_size"]
    computed = [LINEAR if i % 4 != 3 else FULL for i in range(num_layers)]
    if num_layers < 4:
        computed[-1] = FULL
    key_heads = fields.size("linear_num_key_heads", default=heads)
    key_size = fields.size("linear_key_head_dim", default=max(1, int(0.75 * hidden_size / key_heads)))
    values["extra"] |= {
        **_delta_net(fields, key_heads=heads, value_heads=heads, key_size=key_size, value_size=2 * key_size),
        "linear_allow_neg_eigval": fields.flag("linear_allow_neg_eigval", default=True),
        "layer_types": _layer_types(fields, computed),
        "has_rope": theta is not None,  # a null, which is not an absence, is how published files say so
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


def _renamed(fields: Fields, names: Mapping[str, str]) -> Fields:
    """With the values of the fields on the left under the names on the right, too."""
    there = {new: fields.raw[old] for old, new in names.items() if fields.raw.get(old) is not None}
    return Fields({**fields.raw, **there}, fields.where)


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
    "kimi_linear": ModelType(
        kv_heads_default=True,
        rms_norm_eps=1e-5,
        honours=_NOT_RUN,
        parse=_parse_kimi_linear,
        # Published files call experts so, and those that transformers writes the MLPs of other layers, too.
        names=TensorNames(renamed=((r"\.block_sparse_moe\.", ".mlp."),), draft_layers=True),
    ),
    "bailing_hybrid": ModelType(
        kv_heads_default=True,
        rope_theta=6_000_000.0,
        honours=_NOT_RUN,
        parse=_parse_bailing_hybrid,
        names=TensorNames(draft_layers=True),
    ),
    "olmo_hybrid": ModelType(
        kv_heads_default=True,
        parse=_parse_olmo_hybrid,
        # Published files call the norms of delta nets so, and those that transformers writes one of attention's, too.
        names=TensorNames(
            renamed=(
                (r"\.attention_layer_norm\.", ".input_layernorm."),
                (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
            ),
        ),
    ),
}
