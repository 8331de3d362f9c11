"""Gated delta rules beside attention, as Qwen 3.5 has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from forebay.families.base.fields import Fields
from forebay.families.base.mixers import DeltaNet
from forebay.families.base.rope import rotary_dim, without_partial_rotary
from forebay.families.base.shape import Shape
from forebay.families.base.tensor_names import TensorNames
from forebay.families.config.model_config import ModelConfig
from forebay.families.config.transformer import (
    FULL,
    LINEAR,
    Defaults,
    TransformerValues,
    kernel_width,
    layers_of,
    transformer,
)

# How the rope shares its dimensions among the axes of a picture: all axes of a text have the same position.
_PICTURE_AXES: Final = ("mrope_section", "mrope_interleaved")


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen35Config(ModelConfig):
    """A configuration with a gated delta rule, and with how many dimensions of a head are rotated."""

    delta: DeltaNet
    rotary_dim: int


class GatedValues(TransformerValues):
    """The values of a `Qwen35Config`."""

    delta: DeltaNet
    rotary_dim: int


def gated_transformer(fields: Fields, *, rotated: float = 0.25) -> GatedValues:
    """Return `Qwen35Config`'s values: as a plain transformer, but for the layers' types and the share of a head that is
    rotated, by default `rotated`."""
    share, whole = without_partial_rotary(fields, default=rotated, ignored=_PICTURE_AXES)
    values = transformer(whole, Defaults(head_dim=256), layer_types=())
    dim = rotary_dim(fields, values["head_dim"], share)
    interval = fields.size("full_attention_interval", default=4)
    computed = [LINEAR if (i + 1) % interval else FULL for i in range(values["num_layers"])]
    delta = delta_net(fields, key_heads=16, value_heads=32, key_size=128, value_size=128)
    return {**values, "layer_types": tuple(layers_of(fields, computed)), "rotary_dim": dim, "delta": delta}


def delta_net(fields: Fields, *, key_heads: int, value_heads: int, key_size: int, value_size: int) -> DeltaNet:
    """Read the sizes of a gated delta rule; the arguments are the type's defaults. Raises ModelError unless key heads
    divide value heads."""
    key_heads = fields.size("linear_num_key_heads", default=key_heads)
    value_heads = fields.size("linear_num_value_heads", default=value_heads)
    if value_heads % key_heads:
        raise fields.wrong("linear_num_value_heads", f"a multiple of linear_num_key_heads, {key_heads}")
    return DeltaNet(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_head_dim=fields.size("linear_key_head_dim", default=key_size),
        value_head_dim=fields.size("linear_value_head_dim", default=value_size),
        width=kernel_width(fields, "linear_conv_kernel_dim"),
    )


def small(shape: Shape) -> dict[str, Any]:
    """Return the own fields of a small model: three layers with a delta rule, then one with attention."""
    return {
        "layer_types": shape.cycle(*[LINEAR] * 3, FULL),
        "linear_num_key_heads": shape.num_heads,
        "linear_num_value_heads": 2 * shape.num_heads,
        "linear_key_head_dim": shape.head_dim,
        "linear_value_head_dim": shape.head_dim,
        "linear_conv_kernel_dim": 4,
    }


# What drafts tokens, under the names that DeepSeek has for it.
MTP_HEAD: Final = (
    ("mtp.pre_fc_norm_embedding.", "model.layers.{0}.enorm."),
    ("mtp.pre_fc_norm_hidden.", "model.layers.{0}.hnorm."),
    ("mtp.fc.", "model.layers.{0}.eh_proj."),
    ("mtp.norm.", "model.layers.{0}.shared_head.norm."),
    ("mtp.layers.0.", "model.layers.{0}."),
)
NAMES: Final = TensorNames(
    renamed=((r"^model\.language_model\.", "model."),),
    unused=("model.visual.", "mtp."),
    stacked_experts=True,
    draft_head=MTP_HEAD,
)
# The experts' shares are normalized in any case, and what a draft head has, its tensors say.
HARMLESS: Final = frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "norm_topk_prob"})
