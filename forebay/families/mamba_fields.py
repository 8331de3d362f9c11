"""How the fields of a Mamba mixer are written in configurations, and what hybrids of it need besides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

from forebay.families.fields import MAX_LAYERS, MAX_NUMBER, Fields, is_number
from forebay.families.transformer import FULL, ModelType, parse_transformer

MAMBA: Final = "linear_attention"
HYBRID: Final = "hybrid"
MLP: Final = "mlp"
MOE: Final = "moe"

# What configurations of before transformers 5 call the types of layers.
_OLD_LAYER_TYPES: Final = {"mamba": MAMBA, "attention": FULL}

_MAX_WIDTH: Final = 8  # the native convolution's
_INFINITY: Final = {"__float__": "Infinity"}  # how transformers writes it


def bamba_mixer(fields: Fields, intermediate: int) -> dict[str, Any]:
    """The names that Bamba gave a Mamba-2 mixer's fields; Falcon-H1 and Granite have them too."""
    heads = fields.size("mamba_n_heads", default=128)
    if intermediate % heads:
        raise fields.wrong("mamba_n_heads", f"a divisor of the mixer's {intermediate} channels")
    auto = fields.get("mamba_d_head") in (None, "auto")
    head_dim = intermediate // heads if auto else fields.size("mamba_d_head")
    if heads * head_dim != intermediate:
        raise fields.wrong("mamba_d_head", f"{intermediate // heads}: {intermediate} channels for {heads} heads")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": head_dim,
        "mamba_n_groups": groups_of(fields, "mamba_n_groups", heads, default=1),
        "mamba_d_state": fields.size("mamba_d_state", default=256),
        "mamba_d_conv": kernel_width(fields, "mamba_d_conv"),
        "mamba_conv_bias": fields.flag("mamba_conv_bias", default=True),
        "mamba_proj_bias": fields.flag("mamba_proj_bias", default=False),
        "time_step_limit": step_limit(fields),
    }


def expanded(fields: Fields) -> int:
    return fields.size("mamba_expand", default=2, most=1024) * fields.size("hidden_size")


def groups_of(fields: Fields, name: str, heads: int, *, default: int) -> int:
    groups = fields.size(name, default=default)
    if heads % groups:
        raise fields.wrong(name, f"a divisor of the mixer's {heads} heads")
    return groups


def kernel_width(fields: Fields, name: str) -> int:
    width = fields.size(name, default=4, most=_MAX_WIDTH)
    if width < 2:
        raise fields.wrong(name, "at least 2")
    return width


def rank_of(fields: Fields, name: str, hidden_size: int) -> int:
    return math.ceil(hidden_size / 16) if fields.get(name) in (None, "auto") else fields.size(name)


def step_limit(fields: Fields) -> tuple[float, float]:
    given = fields.get("time_step_limit")
    if given is None:
        return 0.0, math.inf
    values = [math.inf if item == _INFINITY else item for item in given] if isinstance(given, list | tuple) else []
    possible = all(is_number(item) and (0 <= item <= MAX_NUMBER or item == math.inf) for item in values)
    if len(values) != 2 or not possible or values[0] > values[1]:
        raise fields.wrong("time_step_limit", "a lower and an upper bound, of at least 0")
    return float(values[0]), float(values[1])


def factor(fields: Fields, name: str) -> float:
    return factors(fields, name, 1)[0] if fields.get(name) is not None else 1.0


def factors(fields: Fields, name: str, count: int) -> list[float]:
    """Multipliers: a list of `count`, where there is more than one; each 1 where the file is silent."""
    given = fields.get(name)
    values = [1.0] * count if given is None else [given] if count == 1 else given
    if not isinstance(values, list) or len(values) != count:
        raise fields.wrong(name, f"a list of {count} numbers")
    if not all(is_number(value) and 0 < abs(value) <= MAX_NUMBER for value in values):
        raise fields.wrong(name, "finite and not 0")
    return [float(value) for value in values]


def listed_layers(fields: Fields, name: str, known: Sequence[str]) -> list[str]:
    given = fields.get(name)
    if not isinstance(given, list) or not all(isinstance(item, str) for item in given):
        raise fields.wrong(name, "a list of layer types")
    types = [str(_OLD_LAYER_TYPES.get(item, item)) for item in given]
    if not 0 < len(types) <= MAX_LAYERS or not set(types) <= set(known):
        raise fields.wrong(name, f"a list of {', '.join(known)}")
    return types


def hybrid_transformer(kind: ModelType, fields: Fields, layer_types: Sequence[str], **changed: Any) -> dict[str, Any]:
    """As a plain transformer, but for the layers' types; `changed` are fields as those have them."""
    values = parse_transformer(kind, fields.without("layer_types", "layers_block_type").replaced(**changed))
    values["extra"]["layer_types"] = list(layer_types)
    return values


def count_of(fields: Fields, name: str, *, default: int) -> int:
    """A size that may be 0."""
    given = fields.get(name)
    return 0 if type(given) is int and given == 0 else fields.size(name, default=default)
