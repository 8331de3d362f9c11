"""Mamba-2 mixers, alone and beside attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from forebay.families.base.fields import MAX_LAYERS, MAX_NUMBER, Fields, is_number
from forebay.families.base.mixers import Mamba2Mixer
from forebay.families.base.shape import Shape
from forebay.families.config.model_config import ModelConfig
from forebay.families.config.transformer import FULL, LINEAR, kernel_width


def bamba_mixer(fields: Fields, intermediate: int, *, out_bias: str = "mamba_proj_bias") -> Mamba2Mixer:
    """The names that Bamba gave a Mamba-2 mixer's fields; Falcon-H1 and Granite have them too."""
    heads = fields.size("mamba_n_heads", default=128)
    if intermediate % heads:
        raise fields.wrong("mamba_n_heads", f"a divisor of the mixer's {intermediate} channels")
    auto = fields.get("mamba_d_head") in (None, "auto")
    head_dim = intermediate // heads if auto else fields.size("mamba_d_head")
    if heads * head_dim != intermediate:
        raise fields.wrong("mamba_d_head", f"{intermediate // heads}: {intermediate} channels for {heads} heads")
    return Mamba2Mixer(
        num_heads=heads,
        head_dim=head_dim,
        num_groups=groups_of(fields, "mamba_n_groups", heads, default=1),
        state_size=fields.size("mamba_d_state", default=256),
        width=kernel_width(fields, "mamba_d_conv"),
        bias=fields.flag("mamba_proj_bias", default=False),
        conv_bias=fields.flag("mamba_conv_bias", default=True),
        out_bias=fields.flag(out_bias, default=False),
        dt_limit=dt_limit(fields),
    )


def expanded(fields: Fields) -> int:
    """Return the channels of a mixer: the hidden size times `mamba_expand`."""
    return fields.size("mamba_expand", default=2, most=1024) * fields.size("hidden_size")


def small_mixer(shape: Shape) -> dict[str, Any]:
    """Return the fields of a small Mamba-2 mixer."""
    return {
        "mamba_n_heads": 2 * shape.num_heads,
        "mamba_d_head": shape.head_dim,
        "mamba_n_groups": 1,
        "mamba_d_state": 64,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    }


HYBRID: Final = "hybrid"  # a mixer and attention
_INFINITY: Final = {"__float__": "Infinity"}  # how transformers writes it
# What configurations of before transformers 5 call the types of layers.
_OLD_LAYER_TYPES: Final = {"mamba": LINEAR, "attention": FULL}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba2Config(ModelConfig):
    """A configuration with the sizes of a Mamba-2 mixer."""

    mixer: Mamba2Mixer


def groups_of(fields: Fields, name: str, heads: int, *, default: int) -> int:
    """Return the groups of heads that share b and c. Raises ModelError for a number that does not divide the heads."""
    groups = fields.size(name, default=default)
    if heads % groups:
        raise fields.wrong(name, f"a divisor of the mixer's {heads} heads")
    return groups


def dt_limit(fields: Fields) -> tuple[float, float]:
    """Return the bounds of dt: at least 0, and infinity for none."""
    given = fields.get("time_step_limit")
    if given is None:
        return 0.0, math.inf
    values = [math.inf if item == _INFINITY else item for item in given] if isinstance(given, list | tuple) else []
    possible = all(is_number(item) and (0 <= item <= MAX_NUMBER or item == math.inf) for item in values)
    if len(values) != 2 or not possible or values[0] > values[1]:
        raise fields.wrong("time_step_limit", "a lower and an upper bound, of at least 0")
    return float(values[0]), float(values[1])


def listed_layers(fields: Fields, name: str, known: Sequence[str]) -> list[str]:
    """Return the layer types of hybrids of mixers and something else, under names of any age."""
    given = fields.get(name)
    if not isinstance(given, list) or not all(isinstance(item, str) for item in given):
        raise fields.wrong(name, "a list of layer types")
    types = [str(_OLD_LAYER_TYPES.get(item, item)) for item in given]
    if not 0 < len(types) <= MAX_LAYERS or not set(types) <= set(known):
        raise fields.wrong(name, f"a list of {', '.join(known)}")
    return types
