from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from forebay.families.fields import MAX_LAYERS, MAX_NUMBER, Fields, is_number
from forebay.families.mamba.config import HARMLESS, NAMES, mixers_only
from forebay.families.mixers import Mamba2Mixer
from forebay.families.model_config import Family, ModelConfig
from forebay.families.shape import Shape
from forebay.families.transformer import FULL, LINEAR, kernel_width

HYBRID: Final = "hybrid"  # a mixer and attention

_INFINITY: Final = {"__float__": "Infinity"}  # how transformers writes it
# What configurations of before transformers 5 call the types of layers.
_OLD_LAYER_TYPES: Final = {"mamba": LINEAR, "attention": FULL}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mamba2Config(ModelConfig):
    """A configuration with the sizes of a Mamba-2 mixer."""

    mixer: Mamba2Mixer


def parse(fields: Fields) -> Mamba2Config:
    """Read Mamba-2's fields: layers of mixers alone. Raises ModelError unless heads times their size are the mixer's
    channels."""
    heads, head_dim = fields.size("num_heads", default=128), fields.size("head_dim", default=64)
    intermediate = fields.size("expand", default=2, most=1024) * fields.size("hidden_size")
    if heads * head_dim != intermediate:
        raise fields.wrong("num_heads", f"such that with a head_dim of {head_dim} there are {intermediate} channels")
    mixer = Mamba2Mixer(
        num_heads=heads,
        head_dim=head_dim,
        num_groups=groups_of(fields, "n_groups", heads, default=8),
        state_size=fields.size("state_size", default=128),
        width=kernel_width(fields, "conv_kernel"),
        bias=fields.flag("use_bias", default=False),
        conv_bias=fields.flag("use_conv_bias", default=True),
        out_bias=fields.flag("use_bias", default=False),
        dt_limit=dt_limit(fields),
    )
    return Mamba2Config(**mixers_only(fields, tied=False), mixer=mixer)


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


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model, with a state of 64."""
    return {"num_heads": 2 * shape.num_heads, "state_size": 64, "n_groups": 1, "expand": 2}


FAMILY: Final = Family(parse=parse, small=small, harmless=HARMLESS | {"time_step_rank"}, names=NAMES)
