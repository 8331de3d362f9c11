from __future__ import annotations

from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.mixers import Mamba2Mixer
from forebay.families.base.shape import Shape
from forebay.families.config.model_config import Family
from forebay.families.config.transformer import kernel_width
from forebay.families.parts.mamba import HARMLESS, NAMES, mixers_only
from forebay.families.parts.mamba2 import Mamba2Config, dt_limit, groups_of


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


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model, with a state of 64."""
    return {"num_heads": 2 * shape.num_heads, "state_size": 64, "n_groups": 1, "expand": 2}


FAMILY: Final = Family(parse=parse, small=small, harmless=HARMLESS | {"time_step_rank"}, names=NAMES)
