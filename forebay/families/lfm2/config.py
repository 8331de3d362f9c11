from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from forebay.families.fields import MAX_LAYERS, MAX_SIZE, Fields
from forebay.families.model_config import Family, ModelConfig
from forebay.families.shape import Shape
from forebay.families.transformer import FULL, Defaults, kernel_width, transformer

CONV: Final = "conv"

LFM_NAMES: Final = {"norm_eps": "rms_norm_eps"}
# What the first LFM2 files call things; where there are both, transformers takes these.
OLD_NAMES: Final = {**LFM_NAMES, "tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
LFM2_DEFAULTS: Final = Defaults(rms_norm_eps=1e-5, rope_theta=1_000_000.0, tied=True, attention_bias=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lfm2Config(ModelConfig):
    """A configuration with the width in tokens of the short convolutions, and whether they have a bias."""

    conv_width: int
    conv_bias: bool


def parse(fields: Fields) -> Lfm2Config:
    """Read LFM2's fields: short convolutions, but for the layers of `full_attn_idxs`."""
    fields = fields.renamed(OLD_NAMES)
    num_layers = fields.size("num_hidden_layers", most=MAX_LAYERS)
    attention = fields.ints("full_attn_idxs", default=list(range(num_layers)))
    computed = [FULL if i in attention else CONV for i in range(num_layers)]
    values = convolutional(fields, LFM2_DEFAULTS, computed)
    return Lfm2Config(**{**values, "intermediate_size": _intermediate_size(fields)})


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


def convolutional(
    fields: Fields,
    defaults: Defaults,
    computed: Sequence[str] | None,
    *,
    possible: Iterable[str] = (CONV, FULL),
    width: int = 3,
) -> dict[str, Any]:
    """Return `Lfm2Config`'s values. `computed`: the kinds of layers of a file that does not list them, None if it
    must."""
    values = transformer(fields, defaults, layer_types=())
    listed = fields.replaced(layer_types=fields.get("layer_types") or computed)
    return {
        **values,
        "layer_types": tuple(listed.one_of_each("layer_types", values["num_layers"], tuple(possible))),
        "conv_width": kernel_width(fields, "conv_L_cache", default=width),
        "conv_bias": fields.flag("conv_bias", default=False),
    }


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model: two layers with a convolution, then one with attention."""
    return {"layer_types": shape.cycle(CONV, CONV, FULL), "block_auto_adjust_ff_dim": False}


FAMILY: Final = Family(parse=parse, small=small)
