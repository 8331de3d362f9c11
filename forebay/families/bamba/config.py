from __future__ import annotations

from typing import Any, Final

from forebay.families.fields import MAX_LAYERS, Fields
from forebay.families.mamba.config import KERNELS
from forebay.families.mamba2.config import Mamba2Config, dt_limit, groups_of
from forebay.families.mixers import Mamba2Mixer
from forebay.families.model_config import Family
from forebay.families.rope import without_partial_rotary
from forebay.families.shape import Shape
from forebay.families.transformer import FULL, LINEAR, Defaults, kernel_width, transformer

_ROTATED: Final = 0.5


def parse(fields: Fields) -> Mamba2Config:
    """Half of each head is rotated, whatever the file says in transformers, so that it must say nothing else."""
    num_layers = fields.size("num_hidden_layers", most=MAX_LAYERS)
    attention = set(fields.ints("attn_layer_indices", default=[]))
    layers = [FULL if layer in attention else LINEAR for layer in range(num_layers)]
    share, whole = without_partial_rotary(fields, default=_ROTATED)
    if share != _ROTATED:
        raise fields.wrong("partial_rotary_factor", f"{_ROTATED}, not {share}")
    values = transformer(whole, Defaults(rms_norm_eps=1e-5, mlp_bias=True), layer_types=layers)
    if values["head_dim"] % 4:
        raise fields.wrong("head_dim", "a multiple of 4: the rotated half pairs its halves")
    return Mamba2Config(**values, mixer=bamba_mixer(fields, expanded(fields)))


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


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model: every fourth layer has attention."""
    return {**small_mixer(shape), "attn_layer_indices": list(range(2, shape.num_layers, 4))}


FAMILY: Final = Family(parse=parse, small=small, harmless=KERNELS | {"z_loss_coefficient"})
