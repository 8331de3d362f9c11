"""Models with short convolutions, sliding windows and sinks: LFM2, dense and with experts, LFM3, Gemma 3, gpt-oss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from forebay.families.fields import MAX_LAYERS, MAX_SIZE, Fields
from forebay.families.rope import rope_theta_and_scaling
from forebay.families.tensor_names import TensorNames
from forebay.families.transformer import FULL, SLIDING, ModelType, parse_transformer

CONV: Final = "conv"

_LFM_NAMES: Final = {"norm_eps": "rms_norm_eps"}
# What the first LFM2 files call things; where there are both, transformers takes these.
_OLD_LFM2_NAMES: Final = {**_LFM_NAMES, "tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}

_LFM3_ROPES: Final = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
}
_GPT_OSS_ROPE: Final = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
# Published Gemma 3 files leave out what is as in the 4B model.
_GEMMA3_SIZES: Final = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}

# Published multimodal files have the first names, those saved by a model without a head the third.
_GEMMA3_TENSORS: Final = TensorNames(
    renamed=(
        (r"^language_model\.model\.", "model."),
        (r"^language_model\.lm_head\.", "lm_head."),
        (r"^model\.language_model\.", "model."),
    ),
    unused=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
)
_MAX_CONV_WIDTH: Final = 8  # the native convolution's


def _parse_lfm2(kind: ModelType, fields: Fields) -> dict[str, Any]:
    fields = fields.renamed(_OLD_LFM2_NAMES)
    num_layers = fields.size("num_hidden_layers", most=MAX_LAYERS)
    attention = fields.ints("full_attn_idxs", default=list(range(num_layers)))
    computed = [FULL if i in attention else CONV for i in range(num_layers)]
    values = _parse_convolutional(kind, fields, computed, width=3)
    values["intermediate_size"] = _lfm2_intermediate_size(fields)
    return values


def _lfm2_intermediate_size(fields: Fields) -> int:
    """Two thirds of what the file says, times its multiplier, rounded up to a multiple: as the weights are."""
    size = fields.size("intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim", default=True):
        return size
    multiplier = fields.number("block_ffn_dim_multiplier", default=1.0)
    multiple = fields.size("block_multiple_of", default=256)
    adjusted = multiplier * int(2 * size / 3)
    if not 1 <= adjusted <= MAX_SIZE - multiple:
        raise fields.wrong("block_ffn_dim_multiplier", f"a factor that leaves {size} in bounds")
    return -(-int(adjusted) // multiple) * multiple


def _parse_lfm2_moe(kind: ModelType, fields: Fields) -> dict[str, Any]:
    fields = fields.renamed(_OLD_LFM2_NAMES)
    values = _parse_convolutional(kind, fields, None, width=3)
    num_experts = fields.size("num_experts", default=32)
    num_dense = 2 if fields.get("num_dense_layers") is None else fields.size("num_dense_layers", default=0)
    values["extra"] |= {
        "num_experts": num_experts,
        "num_experts_per_tok": fields.size("num_experts_per_tok", default=4, most=num_experts),
        "moe_intermediate_size": fields.size("moe_intermediate_size", default=1792),
        "num_dense_layers": num_dense,
        "use_expert_bias": fields.flag("use_expert_bias", default=True),
        "norm_topk_prob": fields.flag("norm_topk_prob", default=True),
        "routed_scaling_factor": fields.number("routed_scaling_factor", default=1.0),
    }
    return values


def _parse_lfm3(kind: ModelType, fields: Fields) -> dict[str, Any]:
    fields = fields if fields.has("rms_norm_eps") else fields.renamed(_LFM_NAMES)
    if fields.has("rope_theta") or fields.has("rope_scaling"):
        raise fields.wrong("rope_theta", "absent, and rope_scaling too: there is one for each kind of attention")
    computed = [_lfm3_layer_type(i) for i in range(fields.size("num_hidden_layers", most=MAX_LAYERS))]
    values = _parse_convolutional(kind, fields.without("rope_parameters"), computed, width=7)
    values["sliding_window"] = fields.size("sliding_window", default=kind.window)
    values["extra"] |= {
        "use_sandwich_norm": fields.flag("use_sandwich_norm", default=True),
        "use_attention_gate": fields.flag("use_attention_gate", default=True),
    }
    ropes = fields.get("rope_parameters") or _LFM3_ROPES
    return _with_ropes(fields.replaced(rope_parameters=ropes), values, {FULL: 1e6, SLIDING: 1e6})


def _lfm3_layer_type(layer: int) -> str:
    if layer % 4 == 2:
        return FULL
    return SLIDING if layer % 4 == 0 and layer > 0 else CONV


def _parse_convolutional(
    kind: ModelType, fields: Fields, computed: Sequence[str] | None, *, width: int
) -> dict[str, Any]:
    """`computed`: the kinds of layers of a file that does not list them; None where it has to."""
    values = parse_transformer(kind, fields.without("layer_types"))
    possible = (CONV, FULL, SLIDING) if kind.window else (CONV, FULL)
    given = fields.get("layer_types") or computed
    given = fields.replaced(layer_types=given).one_of_each("layer_types", values["num_layers"], possible)
    width = fields.size("conv_L_cache", default=width, most=_MAX_CONV_WIDTH)
    if width < 2:
        raise fields.wrong("conv_L_cache", "at least 2: a convolution over one token keeps nothing")
    values["extra"] |= {
        "layer_types": given,
        "conv_L_cache": width,
        "conv_bias": fields.flag("conv_bias", default=False),
    }
    return values


def _parse_gemma3(kind: ModelType, fields: Fields) -> dict[str, Any]:
    fields = fields.replaced(**{name: size for name, size in _GEMMA3_SIZES.items() if fields.get(name) is None})
    fields.only("hidden_activation", "gelu_pytorch_tanh")
    if fields.flag("use_bidirectional_attention", default=False):
        raise fields.wrong("use_bidirectional_attention", "false: tokens are served as they come")
    values = parse_transformer(kind, fields.without("rope_parameters", "rope_scaling", "rope_theta"))
    scalar = fields.number("query_pre_attn_scalar", default=256.0)
    if scalar == 0:
        raise fields.wrong("query_pre_attn_scalar", "above 0")
    values["extra"]["query_pre_attn_scalar"] = scalar
    thetas = {FULL: fields.get("rope_theta") or 1e6, SLIDING: fields.get("rope_local_base_freq") or 1e4}
    return _with_window(fields, _with_ropes(fields, values, thetas))


def _gemma3_windowed(fields: Fields, num_layers: int) -> list[int]:
    pattern = fields.size("sliding_window_pattern", default=6)
    return [i for i in range(num_layers) if (i + 1) % pattern]


def _parse_gpt_oss(kind: ModelType, fields: Fields) -> dict[str, Any]:
    fields = fields.renamed({"num_experts": "num_local_experts"})
    quantization = fields.get("quantization_config") or {"quant_method": "mxfp4"}
    if not isinstance(quantization, dict) or quantization.get("quant_method") != "mxfp4":
        raise fields.wrong("quantization_config", "absent, or of the quant_method mxfp4")
    rope = fields.get("rope_scaling") or fields.get("rope_parameters", _GPT_OSS_ROPE)
    values = parse_transformer(kind, fields.replaced(rope_scaling=rope))
    num_experts = fields.size("num_local_experts", default=128)
    values["attention_bias"] = fields.flag("attention_bias", default=True)
    values["extra"] |= {
        "num_experts": num_experts,
        "num_experts_per_tok": fields.size("num_experts_per_tok", default=4, most=num_experts),
        "swiglu_alpha": fields.number("swiglu_alpha", default=1.702),
        "swiglu_limit": fields.number("swiglu_limit", default=7.0),
    }
    return _with_window(fields, values)


def _every_other(fields: Fields, num_layers: int) -> list[int]:
    return list(range(0, num_layers, 2))


def _with_window(fields: Fields, values: dict[str, Any]) -> dict[str, Any]:
    """ModelError where layers have a window, by the file or by the type's pattern, and the file says there is none."""
    if not values["sliding_window"] and fields.get("layer_types") != values["extra"]["layer_types"]:
        raise fields.wrong("sliding_window", "a number of tokens")
    return values


def _with_ropes(fields: Fields, values: dict[str, Any], thetas: Mapping[str, Any]) -> dict[str, Any]:
    """`extra["ropes"]`: base and scaling for each kind of attention. `thetas`: the bases of those that name none.

    An older file's `rope_scaling` is that of the layers with full attention.
    """
    given = fields.get("rope_parameters") or {kind: {} for kind in thetas}
    if not isinstance(given, dict) or set(given) != set(thetas) or not all(isinstance(r, dict) for r in given.values()):
        raise fields.wrong("rope_parameters", f"an object for each of {' and '.join(thetas)}")
    scaling = fields.get("rope_scaling") or {}
    if not isinstance(scaling, dict):
        raise fields.wrong("rope_scaling", "an object")
    ropes = {}
    for kind, theta in thetas.items():
        parameters = {"rope_theta": theta, **given[kind], **(scaling if kind == FULL else {})}
        ropes[kind] = rope_theta_and_scaling(
            Fields({"rope_parameters": parameters}, f"{fields.where}: {kind}"),
            default_theta=theta,
            max_positions=values["max_position_embeddings"],
        )
    values["extra"]["ropes"] = ropes
    values["rope_theta"], values["rope_scaling"] = ropes[FULL]
    return values


def _always(fields: Fields) -> bool:
    return True


TYPES: Final[dict[str, ModelType]] = {
    "lfm2": ModelType(rms_norm_eps=1e-5, rope_theta=1_000_000.0, tied=True, parse=_parse_lfm2),
    "lfm2_moe": ModelType(rms_norm_eps=1e-5, rope_theta=1_000_000.0, tied=True, parse=_parse_lfm2_moe),
    "lfm3": ModelType(
        head_dim=128, rms_norm_eps=1e-5, tied=True, window=256, harmless=frozenset({"norm_eps"}), parse=_parse_lfm3
    ),
    "gemma3_text": ModelType(
        head_dim=256,
        tied=True,
        window=4096,
        has_layer_types=True,
        uses_window=_always,
        windowed_layers=_gemma3_windowed,
        harmless=frozenset({"hidden_act", "_sliding_window_pattern"}),
        parse=_parse_gemma3,
        names=_GEMMA3_TENSORS,
    ),
    "gpt_oss": ModelType(
        head_dim=64,
        rms_norm_eps=1e-5,
        rope_theta=150_000.0,
        window=128,
        has_layer_types=True,
        uses_window=_always,
        windowed_layers=_every_other,
        parse=_parse_gpt_oss,
        names=TensorNames(mxfp4=True),
    ),
}
