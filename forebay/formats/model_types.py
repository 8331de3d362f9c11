"""The model_types that are served: what transformers 5 assumes where a config.json is silent, and their own fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from forebay.base.errors import ModelError
from forebay.formats import types_delta, types_mamba, types_window
from forebay.formats.config_fields import Fields
from forebay.formats.model_type import ModelType


def _smollm3_extra(fields: Fields, num_layers: int) -> dict[str, Any]:
    interval = fields.size("no_rope_layer_interval", default=4)
    default = [int((i + 1) % interval != 0) for i in range(num_layers)]
    no_rope_layers = fields.ints("no_rope_layers", default=default)
    if len(no_rope_layers) < num_layers:
        raise fields.wrong("no_rope_layers", f"one entry for each of {num_layers} layers")
    return {"no_rope_layers": no_rope_layers[:num_layers]}


def _moe_extra(fields: Fields, num_layers: int) -> dict[str, Any]:
    # transformers 5 writes num_local_experts and reads both.
    num_experts = fields.size("num_local_experts" if "num_experts" not in fields.raw else "num_experts")
    return {
        "num_experts": num_experts,
        "num_experts_per_tok": fields.size("num_experts_per_tok", most=num_experts),
        "moe_intermediate_size": fields.size("moe_intermediate_size"),
        "norm_topk_prob": fields.flag("norm_topk_prob", default=False),
        "decoder_sparse_step": fields.size("decoder_sparse_step", default=1),
        "mlp_only_layers": fields.ints("mlp_only_layers", default=[]),
    }


def _late_layers(fields: Fields, num_layers: int) -> list[int]:
    return list(range(fields.size("max_window_layers", default=28), num_layers))


def _no_rope_layers(fields: Fields, num_layers: int) -> list[int]:
    return [i for i, has_rope in enumerate(_smollm3_extra(fields, num_layers)["no_rope_layers"]) if not has_rope]


def _always(raw: Mapping[str, Any]) -> bool:
    return True


def _when_asked(raw: Mapping[str, Any]) -> bool:
    return raw.get("use_sliding_window") is True


MODEL_TYPES: Final = {
    "llama": ModelType(kv_heads_default=True),
    "mistral": ModelType(window=4096, uses_window=_always),
    "qwen2": ModelType(window=4096, has_layer_types=True, uses_window=_when_asked, windowed_layers=_late_layers),
    "qwen3": ModelType(
        head_dim=128, window=4096, has_layer_types=True, uses_window=_when_asked, windowed_layers=_late_layers
    ),
    "smollm3": ModelType(
        rope_theta=2_000_000.0,
        tied=True,
        has_layer_types=True,
        uses_window=_when_asked,
        windowed_layers=_no_rope_layers,
        extra=_smollm3_extra,
    ),
    "olmo2": ModelType(kv_heads_default=True, rms_norm_eps=1e-5),
    "qwen3_moe": ModelType(window=4096, uses_window=_when_asked, extra=_moe_extra),
    **types_delta.TYPES,
    **types_mamba.TYPES,
    **types_window.TYPES,
}

# Fields that would change what is computed, with the values that change nothing. Absent and null never do.
_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "hidden_act": ("silu",),
    "pretraining_tp": (1,),
    "quantization_config": (),
    "auto_map": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "logit_scale": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0),
    "attention_multiplier": (),
    "is_encoder_decoder": (False,),
    "use_mrope": (False,),
    "use_qk_norm": (False,),
}


def model_type_of(raw: Mapping[str, Any], where: str) -> str:
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        raise ModelError(
            f"{where}: model_type {str(model_type)[:60]!r} is not supported; supported are {', '.join(MODEL_TYPES)}"
        )
    return model_type


def refuse_unsupported(kind: ModelType, raw: Mapping[str, Any], where: str) -> None:
    """ModelError for the first field that asks for something else than what is computed here."""
    for name, neutral in _NEUTRAL.items():
        if name in kind.honours:
            continue
        value = raw.get(name)
        if value is not None and not (value in neutral and type(value) in (bool, int, float, str)):
            advice = "remote code is never run" if name == "auto_map" else "the results would be wrong"
            raise ModelError(f"{where}: {name} {str(value)[:80]} is not supported: {advice}")
