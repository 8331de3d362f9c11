from __future__ import annotations

from typing import Any, Final

from forebay.families.base.fields import MAX_LAYERS, Fields
from forebay.families.base.rope import without_partial_rotary
from forebay.families.base.shape import Shape
from forebay.families.config.model_config import Family
from forebay.families.config.transformer import FULL, LINEAR, Defaults, transformer
from forebay.families.parts.mamba import KERNELS
from forebay.families.parts.mamba2 import Mamba2Config, bamba_mixer, expanded, small_mixer

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


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model: every fourth layer has attention."""
    return {**small_mixer(shape), "attn_layer_indices": list(range(2, shape.num_layers, 4))}


FAMILY: Final = Family(parse=parse, small=small, harmless=KERNELS | {"z_loss_coefficient"})
