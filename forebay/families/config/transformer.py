"""The fields that decoder-only transformers share, and how the kinds of their layers are written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypedDict

from forebay.families.base.fields import MAX_LAYERS, Fields
from forebay.families.base.rope import rope_theta_and_scaling
from forebay.families.base.shape import Shape
from forebay.families.config.model_config import Experts, Family, ModelConfig, nothing

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
LINEAR: Final = "linear_attention"

_MAX_WIDTH: Final = 8  # the native convolution's


@dataclass(frozen=True, kw_only=True, slots=True)
class Defaults:
    """Defaults of transformers 5.24 for a type where a config.json is silent, and whether its biases count.

    `head_dim` 0 stands for hidden_size / num_attention_heads; `kv_heads`: there may be no num_key_value_heads, of which
    there are then as many as attention heads.
    """

    head_dim: int = 0
    kv_heads: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    tied: bool = False
    attention_bias: bool = True
    mlp_bias: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """`size` is in tokens if the file has none; a null in the file is a value. `layers` returns which of n layers have
    a window if the file does not list them, which it may if `listed`. `required`: a null is refused if the type's own
    pattern gives layers a window."""

    size: int = 4096
    layers: Callable[[int], Iterable[int]] = range
    listed: bool = True
    required: bool = False


class CommonValues(TypedDict):
    """The values of a `ModelConfig` that every model has."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


class LayerValues(CommonValues):
    """Further values without a default."""

    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    layer_types: tuple[str, ...]


class TransformerValues(LayerValues):
    """The values of a `ModelConfig` that a plain transformer has."""

    rope_scaling: dict[str, Any] | None
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    sliding_window: int  # tokens, 0 for none


def common(fields: Fields) -> CommonValues:
    """Return the values that all models have, as `ModelConfig` calls it."""
    vocab_size = fields.size("vocab_size")
    return {
        "model_type": fields.raw["model_type"],
        "vocab_size": vocab_size,
        "hidden_size": fields.size("hidden_size"),
        "num_layers": fields.size("num_hidden_layers", most=MAX_LAYERS),
        "bos_token_id": next(iter(fields.token_ids("bos_token_id", vocab_size)), None),
        "eos_token_ids": fields.token_ids("eos_token_id", vocab_size),
    }


def transformer(
    fields: Fields,
    defaults: Defaults,
    *,
    windows: Windows | None = None,
    layer_types: Sequence[str] | None = None,
) -> TransformerValues:
    """Return `ModelConfig`'s values. `windows` None: no layer has one, whatever the file says. `layer_types` are given
    by a family that reads them itself."""
    shared = common(fields)
    num_layers, hidden_size = shared["num_layers"], shared["hidden_size"]
    num_heads = fields.size("num_attention_heads")
    max_positions = fields.size("max_position_embeddings", most=1 << 24)
    head_dim = fields.size("head_dim", default=defaults.head_dim or max(1, hidden_size // num_heads))
    if head_dim % 2:
        raise fields.wrong("head_dim", "an even number: rotary embedding pairs its halves")
    num_kv_heads = fields.size("num_key_value_heads", default=num_heads if defaults.kv_heads else None)
    if num_heads % num_kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads, {num_heads}")
    theta, scaling = rope_theta_and_scaling(fields, default_theta=defaults.rope_theta, max_positions=max_positions)
    window = 0 if windows is None else _window(windows, fields)
    return {
        **shared,
        "intermediate_size": fields.size("intermediate_size"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": fields.number("rms_norm_eps", default=defaults.rms_norm_eps),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": fields.flag("tie_word_embeddings", default=defaults.tied),
        "attention_bias": fields.flag("attention_bias", default=False) and defaults.attention_bias,
        "mlp_bias": fields.flag("mlp_bias", default=False) and defaults.mlp_bias,
        "sliding_window": window,
        "layer_types": tuple(_kinds(windows, fields, num_layers, window) if layer_types is None else layer_types),
    }


def plain(
    defaults: Defaults,
    *,
    windows: Callable[[Fields], Windows | None] = lambda fields: None,
    small: Callable[[Shape], dict[str, Any]] = nothing,
    harmless: frozenset[str] = frozenset(),
) -> Family:
    """A family with nothing in its configuration but what all transformers have."""

    def parse(fields: Fields) -> ModelConfig:
        return ModelConfig(**transformer(fields, defaults, windows=windows(fields)))

    return Family(parse=parse, small=small, harmless=harmless)


def _window(windows: Windows, fields: Fields) -> int:
    """In tokens, 0 for none, which a file says with a null. A 0 in a file would be a window without a token in it."""
    absent = 0 if fields.has("sliding_window") else windows.size
    return absent if fields.get("sliding_window") is None else fields.size("sliding_window", least=1)


def _kinds(windows: Windows | None, fields: Fields, num_layers: int, window: int) -> list[str]:
    """Return `full_attention` or `sliding_attention` for each layer; sliding only if there is a window."""
    pattern = _pattern(windows, num_layers) if window else [FULL] * num_layers
    listed = fields.get("layer_types")
    if listed == pattern:
        return pattern
    if windows is not None and windows.required and not window:
        raise fields.wrong("sliding_window", "a number of tokens")
    if listed is None:
        return pattern
    given = fields.one_of_each("layer_types", num_layers, (FULL, SLIDING) if window else (FULL,))
    if windows is None or not windows.listed:
        raise fields.wrong("layer_types", f"absent: all layers of this type are {pattern[0]}")
    return given


def _pattern(windows: Windows | None, num_layers: int) -> list[str]:
    """Return the kind of each layer of a file that does not list them."""
    windowed = set() if windows is None else set(windows.layers(num_layers))
    return [SLIDING if layer in windowed else FULL for layer in range(num_layers)]


def layers_of(fields: Fields, computed: Sequence[str], possible: Iterable[str] = (LINEAR, FULL)) -> list[str]:
    """Return the layers as the file lists them, each one of those `possible`; `computed` if it does not."""
    if fields.get("layer_types") is None:
        return list(computed)
    return fields.one_of_each("layer_types", len(computed), tuple(possible))


def experts(
    fields: Fields,
    *,
    name: str = "num_experts",
    number: int | None = None,
    per_token: int | None = None,
    intermediate_size: int | None = None,
) -> Experts:
    """Read the experts. The defaults are the type's; None if its files must have the field."""
    number = fields.size(name, default=number)
    return Experts(
        num_experts=number,
        per_token=fields.size("num_experts_per_tok", default=per_token, most=number),
        intermediate_size=fields.size("moe_intermediate_size", default=intermediate_size),
    )


def kernel_width(fields: Fields, name: str, *, default: int = 4) -> int:
    """Tokens that a short convolution sees."""
    width = fields.size(name, default=default, most=_MAX_WIDTH)
    if width < 2:
        raise fields.wrong(name, "at least 2: a convolution over one token keeps nothing")
    return width


def count_of(fields: Fields, name: str, *, default: int) -> int:
    """A size that may be 0."""
    given = fields.get(name)
    return 0 if type(given) is int and given == 0 else fields.size(name, default=default)
