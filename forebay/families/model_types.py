"""The model_types that are served: what transformers 5 assumes where a config.json is silent, and their own fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from forebay.base.errors import ModelError, brief
from forebay.families import types_delta, types_mamba, types_window
from forebay.families.fields import Fields
from forebay.families.transformer import ModelType


def _smollm3_extra(fields: Fields, num_layers: int) -> dict[str, Any]:
    interval = fields.size("no_rope_layer_interval", default=4)
    default = [int((i + 1) % interval != 0) for i in range(num_layers)]
    no_rope_layers = fields.ints("no_rope_layers", default=default)
    if len(no_rope_layers) < num_layers:
        raise fields.wrong("no_rope_layers", f"one entry for each of {num_layers} layers")
    return {"no_rope_layers": no_rope_layers[:num_layers]}


def _moe_extra(fields: Fields, num_layers: int) -> dict[str, Any]:
    # transformers 5 writes num_local_experts and reads both.
    num_experts = fields.size("num_experts" if fields.has("num_experts") else "num_local_experts")
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


def _always(fields: Fields) -> bool:
    return True


def _when_asked(fields: Fields) -> bool:
    return fields.flag("use_sliding_window", default=False)


# Of a window that is not asked for.
_WINDOW: Final = frozenset({"sliding_window", "max_window_layers"})


MODEL_TYPES: Final = {
    "llama": ModelType(kv_heads_default=True),
    "mistral": ModelType(window=4096, uses_window=_always),
    "qwen2": ModelType(
        window=4096,
        has_layer_types=True,
        uses_window=_when_asked,
        windowed_layers=_late_layers,
        harmless=_WINDOW,
    ),
    "qwen3": ModelType(
        head_dim=128,
        window=4096,
        has_layer_types=True,
        uses_window=_when_asked,
        windowed_layers=_late_layers,
        harmless=_WINDOW,
    ),
    "smollm3": ModelType(
        rope_theta=2_000_000.0,
        tied=True,
        has_layer_types=True,
        uses_window=_when_asked,
        windowed_layers=_no_rope_layers,
        extra=_smollm3_extra,
        harmless=_WINDOW,
    ),
    "olmo2": ModelType(kv_heads_default=True, rms_norm_eps=1e-5),
    "qwen3_moe": ModelType(window=4096, uses_window=_when_asked, extra=_moe_extra, harmless=_WINDOW),
    **types_delta.TYPES,
    **types_mamba.TYPES,
    **types_window.TYPES,
}


def model_type_of(raw: Mapping[str, Any], where: str) -> str:
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        raise ModelError(
            f"{where}: model_type {brief(model_type)} is not supported; supported are {', '.join(MODEL_TYPES)}"
        )
    return model_type
