"""Models with delta rules or latent attention: Qwen3-Next, Qwen3.5 (dense and with experts), DeepSeek-V3, Kimi Linear,
Ling 3 (`bailing_hybrid`), OLMo hybrids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from forebay.families.fields import Fields
from forebay.families.rope import ROPE_FIELDS, TRAINED_LENGTH, rope_parameters, without_partial_rotary
from forebay.families.tensor_names import TensorNames
from forebay.families.transformer import FULL, ModelType, parse_transformer

LINEAR: Final = "linear_attention"

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
    values = _parse_qwen3_5(kind, _with_default(fields, intermediate_size=inner))
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
    share, whole = without_partial_rotary(fields, default=0.25, ignored=_PICTURE_AXES)
    values = parse_transformer(kind, whole.without("layer_types"))
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
    fields.only("scoring_func", "sigmoid")
    fields.only("topk_method", "noaux_tc")
    fields.only("moe_layer_freq", 1)
    values = _latent_transformer(kind, fields)
    fields.only("head_dim", values["head_dim"])
    values["extra"] |= {
        **_latent_attention(fields, q_rank=1536),
        **_grouped_experts(fields, num_experts=256, scale=2.5, inner=2048, groups=8, best_groups=4),
        "rope_interleave": fields.flag("rope_interleave", default=True),
        "mlp_layer_types": _mlp_layer_types(fields.without("mlp_layer_types"), values["num_layers"], dense=3),
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
    fields = fields.renamed(_NAMES, nulls=True)
    fields.only("moe_router_activation_func", "sigmoid")
    fields.only("moe_layer_freq", 1)
    fields.only("mla_use_nope", True)
    fields.only("tie_word_embeddings", False)
    values = _latent_transformer(kind, fields.dropped(*ROPE_FIELDS))
    linear = fields.under(fields.within("linear_attn_config").renamed(_KIMI_LINEAR_NAMES))
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


_SHORT_CONV: Final = {"short_conv_kernel_size": "linear_conv_kernel_dim"}


def _kimi_layers(fields: Fields, num_layers: int) -> list[str]:
    """Files list the layers of both kinds, and count from 1."""
    if not fields.has("full_attn_layers") or not fields.has("kda_layers"):
        return [FULL if i and i % 4 == 0 else LINEAR for i in range(num_layers)]
    full, linear = fields.ints("full_attn_layers", default=[]), fields.ints("kda_layers", default=[])
    if sorted(full + linear) != list(range(1, num_layers + 1)):
        raise fields.wrong("kda_layers", f"those of layers 1 to {num_layers} that full_attn_layers does not have")
    return [FULL if i + 1 in full else LINEAR for i in range(num_layers)]


def _parse_bailing_hybrid(kind: ModelType, fields: Fields) -> dict[str, Any]:
    fields = fields.renamed(_NAMES, nulls=True)
    fields.only("tie_word_embeddings", False)
    rope = rope_parameters(fields)
    if (
        rope.get("rope_type", rope.get("type")) in TRAINED_LENGTH
        and rope.get("original_max_position_embeddings") is None
    ):
        # transformers takes the length of another model, its default, where the file calls its own model_max_length.
        raise fields.wrong("rope_parameters", "with its original_max_position_embeddings")
    values = _latent_transformer(kind, fields)
    # Where it is not a file of the model's makers, head_dim is what is rotated, and these are there as well.
    heads, head_dim = values["num_heads"], fields.size("head_dim", default=128)
    own = fields if fields.has("linear_conv_kernel_dim") else fields.renamed(_SHORT_CONV)
    group = fields.size("layer_group_size", default=6)
    computed = [LINEAR if (i + 1) % group else FULL for i in range(values["num_layers"])]
    bounded = fields.flag("kda_safe_gate", default=True)
    values["extra"] |= {
        **_latent_attention(fields.without("q_lora_rank"), q_rank=0),
        **_grouped_experts(fields, num_experts=512, scale=2.5, inner=768, groups=8, best_groups=4),
        **_kimi_delta(own, heads=heads, head_dim=head_dim),
        "rope_interleave": True,
        "layer_types": _layer_types(fields, computed),
        "mlp_layer_types": _mlp_layer_types(fields, values["num_layers"], dense=2),
        "kda_lower_bound": _lower_bound(fields) if bounded else 0.0,
    }
    return values


def _lower_bound(fields: Fields) -> float:
    value = fields.get("kda_lower_bound")
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
    given = fields.get("mlp_layer_types")
    if given is None:
        name = "first_k_dense_replace"
        dense = dense if fields.get(name) is None else fields.size(name, default=0)
        return ["dense" if i < dense else "sparse" for i in range(num_layers)]
    return fields.one_of_each("mlp_layer_types", num_layers, ("dense", "sparse"))


def _parse_olmo_hybrid(kind: ModelType, fields: Fields) -> dict[str, Any]:
    theta = kind.rope_theta if not fields.has("rope_theta") else fields.get("rope_theta")
    theta = rope_parameters(fields).get("rope_theta", theta)
    values = parse_transformer(kind, fields.without("layer_types"))
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
    values = parse_transformer(kind, fields.replaced(head_dim=size, num_key_value_heads=None, layer_types=None))
    values["extra"]["qk_rope_head_dim"] = size
    return values


def _latent_attention(fields: Fields, *, q_rank: int) -> dict[str, Any]:
    no_q_rank = fields.is_null("q_lora_rank")
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


def _layer_types(fields: Fields, computed: Sequence[str]) -> list[str]:
    if fields.get("layer_types") is None:
        return list(computed)
    return fields.one_of_each("layer_types", len(computed), (LINEAR, FULL))


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


def _with_default(fields: Fields, **values: Any) -> Fields:
    return fields.replaced(**{name: value for name, value in values.items() if not fields.has(name)})


# What drafts tokens (`mtp.`) is not served.
_QWEN_NAMES: Final = TensorNames(
    renamed=((r"^model\.language_model\.", "model."),), unused=("model.visual.", "mtp."), stacked_experts=True
)

# Remote code in published files is what transformers has by now.
_NOT_RUN: Final = frozenset({"auto_map"})
# The experts' shares of these always are.
_NORMALIZED: Final = frozenset({"norm_topk_prob"})
# Heads of latent attention have no keys of their own; layers' MLPs may be listed instead of counted.
_LATENT: Final = _NOT_RUN | {"num_key_value_heads", "qk_head_dim", "first_k_dense_replace"}

# How transformers makes weights that are not in a file.
_INITIAL: Final = frozenset(
    {"linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor", "linear_dt_max", "linear_dt_min"}
)

TYPES: Final[Mapping[str, ModelType]] = {
    "qwen3_5_text": ModelType(head_dim=256, harmless=_NORMALIZED, parse=_parse_qwen3_5, names=_QWEN_NAMES),
    "qwen3_next": ModelType(head_dim=256, parse=_parse_qwen3_next, names=_QWEN_NAMES),
    "qwen3_5_moe_text": ModelType(head_dim=256, harmless=_NORMALIZED, parse=_parse_qwen3_5_moe, names=_QWEN_NAMES),
    "deepseek_v3": ModelType(
        kv_heads_default=True,
        harmless=_LATENT,
        parse=_parse_deepseek_v3,
        names=TensorNames(stacked_experts=True, draft_layers=True),
    ),
    "kimi_linear": ModelType(
        kv_heads_default=True,
        rms_norm_eps=1e-5,
        harmless=_LATENT | {"head_dim"},
        parse=_parse_kimi_linear,
        # Published files call experts so, and those that transformers writes the MLPs of other layers, too.
        names=TensorNames(renamed=((r"\.block_sparse_moe\.", ".mlp."),), draft_layers=True),
    ),
    "bailing_hybrid": ModelType(
        kv_heads_default=True,
        rope_theta=6_000_000.0,
        harmless=_LATENT | {"q_lora_rank", "short_conv_kernel_size"},
        parse=_parse_bailing_hybrid,
        names=TensorNames(draft_layers=True),
    ),
    "olmo_hybrid": ModelType(
        kv_heads_default=True,
        harmless=_INITIAL,
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
