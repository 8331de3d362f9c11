"""Layers of short convolutions, as LFM2 has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from forebay.families.base.fields import Fields
from forebay.families.config.model_config import ModelConfig
from forebay.families.config.transformer import FULL, Defaults, TransformerValues, kernel_width, transformer

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


class ConvolutionalValues(TransformerValues):
    """The values of a `Lfm2Config`."""

    conv_width: int
    conv_bias: bool


def convolutional(
    fields: Fields,
    defaults: Defaults,
    computed: Sequence[str] | None,
    *,
    possible: Iterable[str] = (CONV, FULL),
    width: int = 3,
) -> ConvolutionalValues:
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
