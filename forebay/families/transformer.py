"""What a model_type is: its defaults where a config.json is silent, and how its fields are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from forebay.families.fields import MAX_LAYERS, Fields
from forebay.families.rope import rope_theta_and_scaling
from forebay.families.tensor_names import AS_STORED, TensorNames

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"


def _no_extra(fields: Fields, num_layers: int) -> dict[str, Any]:
    return {}


def _never(fields: Fields) -> bool:
    return False


def _all_layers(fields: Fields, num_layers: int) -> list[int]:
    return list(range(num_layers))


def parse_transformer(kind: ModelType, fields: Fields) -> dict[str, Any]:
    """The fields that decoder-only transformers share."""
    num_layers = fields.size("num_hidden_layers", most=MAX_LAYERS)
    num_heads = fields.size("num_attention_heads")
    hidden_size = fields.size("hidden_size")
    vocab_size = fields.size("vocab_size")
    max_positions = fields.size("max_position_embeddings", most=1 << 24)
    head_dim = fields.size("head_dim", default=kind.head_dim or max(1, hidden_size // num_heads))
    if head_dim % 2:
        raise fields.wrong("head_dim", "an even number: rotary embedding pairs its halves")
    num_kv_heads = fields.size("num_key_value_heads", default=num_heads if kind.kv_heads_default else None)
    if num_heads % num_kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads, {num_heads}")
    theta, scaling = rope_theta_and_scaling(fields, default_theta=kind.rope_theta, max_positions=max_positions)
    window = _window(kind, fields) if kind.uses_window(fields) else 0
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": fields.size("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": fields.number("rms_norm_eps", default=kind.rms_norm_eps),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=kind.tied),
        "attention_bias": fields.flag("attention_bias", default=False),
        "mlp_bias": fields.flag("mlp_bias", default=False),
        "sliding_window": window,
        "extra": {"layer_types": layer_types(kind, fields, num_layers, window), **kind.extra(fields, num_layers)},
    }


def _window(kind: ModelType, fields: Fields) -> int:
    """In tokens, 0 for none, which a file says with a null. A 0 in a file would be a window without a token in it."""
    absent = 0 if fields.has("sliding_window") else kind.window
    return absent if fields.get("sliding_window") is None else fields.size("sliding_window", least=1)


def layer_types(kind: ModelType, fields: Fields, num_layers: int, window: int) -> list[str]:
    """One of `full_attention` and `sliding_attention` for each layer; sliding only where there is a window."""
    windowed = set(kind.windowed_layers(fields, num_layers)) if window else set()
    computed = [SLIDING if i in windowed else FULL for i in range(num_layers)]
    if fields.get("layer_types", computed) == computed:
        return computed
    given = fields.one_of_each("layer_types", num_layers, (FULL, SLIDING) if window else (FULL,))
    if not kind.has_layer_types:
        raise fields.wrong("layer_types", f"absent: all layers of this type are {computed[0]}")
    return given


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelType:
    """Defaults are those of transformers 5.23's configuration classes.

    `windowed_layers` says which layers use the sliding window when the file has no `layer_types` of its own, and
    `uses_window` whether its `sliding_window` counts at all; `window` is the window of a file without that field, which
    a null is not. `head_dim` 0 stands for hidden_size / num_attention_heads.
    `parse` returns `ModelConfig`'s values, without its model_type. `harmless` names fields that it does not ask for and
    that change nothing of what this type computes, see `families.options`. `names` is about the tensors of safetensors
    files.
    """

    head_dim: int = 0
    kv_heads_default: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    tied: bool = False
    window: int = 0
    has_layer_types: bool = False
    uses_window: Callable[[Fields], bool] = _never
    windowed_layers: Callable[[Fields, int], list[int]] = _all_layers
    extra: Callable[[Fields, int], dict[str, Any]] = _no_extra
    harmless: frozenset[str] = frozenset()
    parse: Callable[[ModelType, Fields], dict[str, Any]] = parse_transformer
    names: TensorNames = AS_STORED
