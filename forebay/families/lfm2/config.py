from __future__ import annotations

from typing import Any, Final

from forebay.families.base.fields import MAX_LAYERS, MAX_SIZE, Fields
from forebay.families.base.shape import Shape
from forebay.families.config.model_config import Family
from forebay.families.config.transformer import FULL
from forebay.families.parts.convolution import CONV, LFM2_DEFAULTS, OLD_NAMES, Lfm2Config, convolutional


def parse(fields: Fields) -> Lfm2Config:
    """Read LFM2's fields: short convolutions, but for the layers of `full_attn_idxs`."""
    fields = fields.renamed(OLD_NAMES)
    num_layers = fields.size("num_hidden_layers", most=MAX_LAYERS)
    attention = fields.ints("full_attn_idxs", default=list(range(num_layers)))
    computed = [FULL if i in attention else CONV for i in range(num_layers)]
    values = convolutional(fields, LFM2_DEFAULTS, computed)
    values["intermediate_size"] = _intermediate_size(fields)
    return Lfm2Config(**values)


def _intermediate_size(fields: Fields) -> int:
    """Two thirds of what the file says, times its multiplier, rounded up to a multiple: as the weights are."""
    size = fields.size("intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim", default=True):
        return size
    multiplier = fields.number("block_ffn_dim_multiplier", default=1.0)
    multiple = fields.size("block_multiple_of", default=256)
    adjusted = multiplier * int(2 * size / 3)
    if not 1 <= adjusted <= MAX_SIZE - multiple:
        raise fields.wrong("block_ffn_dim_multiplier", f"a factor that leaves {size} in bounds")
    return -(-int(adjusted) // multiple) * multiple


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model: two layers with a convolution, then one with attention."""
    return {"layer_types": shape.cycle(CONV, CONV, FULL), "block_auto_adjust_ff_dim": False}


FAMILY: Final = Family(parse=parse, small=small)
