"""Pixtral with a patch merger behind it: the encoder of Mistral 3, which reads a whole image at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from forebay.base.errors import ModelError
from forebay.base.pixels import CHANNELS
from forebay.families.base.fields import MAX_LAYERS, Fields
from forebay.families.base.options import unknown_options
from forebay.families.config.vision.base import MAX_TILE, Channels, Vision, VisionConfig, check_heads, pixel_numbers

NORM_EPS: Final = 1e-5  # of the encoder's norms, which no configuration has
MEAN: Final[Channels] = (0.48145466, 0.4578275, 0.40821073)
STD: Final[Channels] = (0.26862954, 0.26130258, 0.27577711)
# Of transformers' class for texts.
_HARMLESS: Final = frozenset({"head_dim", "rope_theta", "vocab_size"})


@dataclass(frozen=True, kw_only=True, slots=True)
class PixtralConfig(VisionConfig):
    """An image is one tile with edges of at most `image_size` pixels, rounded up to whole tokens. Queries and keys are
    rotated by a patch's row and column at the base `theta`. The gate of an MLP is a GELU with `gelu`, else a SiLU. The
    linear layers behind the merger have biases with `projector_bias`. arXiv 2410.07073."""

    image_size: int
    theta: float
    gelu: bool
    projector_bias: bool

    @property
    def max_edge(self) -> int:
        return math.ceil(self.image_size / self.token_edge) * self.token_edge

    @property
    def layer_products(self) -> tuple[int, int]:
        """Return the products of a patch in a layer's matrices, and of a pair of patches in its attention."""
        return 4 * self.hidden_size**2 + 3 * self.hidden_size * self.intermediate_size, 2 * self.hidden_size

    def outer_products(self, output_size: int) -> float:
        """Return the products of a patch in its embedding and the merger, and its share of those of a token."""
        own = self.hidden_size * (CHANNELS * self.patch_size**2 + self.hidden_size)
        return own + output_size * (self.hidden_size + output_size) / self.merge**2


def pixtral(fields: Fields, processor: Fields, vocab_size: int) -> Vision:
    """Read the encoder of a model. Defaults are those of transformers' classes."""
    own = Fields.of_file(fields.get("vision_config"), f"{fields.where}: vision_config")
    own.only("model_type", "pixtral")
    own.only("num_channels", 3)
    own.only("hidden_act", "gelu", "silu")
    fields.only("projector_hidden_act", "gelu")
    fields.only("vision_feature_layer", -1)
    rescale, mean, std = pixel_numbers(processor, MEAN, STD)
    config = PixtralConfig(
        kind=str(fields.get("model_type")),
        placeholder=fields.renamed({"image_token_index": "image_token_id"}).size(
            "image_token_id", default=10, least=0, most=vocab_size - 1
        ),
        image_size=own.size("image_size", default=1024, most=MAX_TILE),
        patch_size=own.size("patch_size", default=16, most=MAX_TILE),
        merge=fields.size("spatial_merge_size", default=2, most=MAX_TILE),
        hidden_size=own.size("hidden_size", default=1024),
        intermediate_size=own.size("intermediate_size", default=4096),
        num_layers=own.size("num_hidden_layers", default=24, most=MAX_LAYERS),
        num_heads=own.size("num_attention_heads", default=16),
        norm_eps=NORM_EPS,
        rescale=rescale,
        mean=mean,
        std=std,
        theta=_theta(own),
        gelu=own.get("hidden_act", "gelu") == "gelu",
        projector_bias=fields.flag("multimodal_projector_bias", default=False),
    )
    _check(config, own)
    return config, tuple(f"vision_config.{name}" for name in unknown_options(own, _HARMLESS))


def _theta(own: Fields) -> float:
    rope = own.within("rope_parameters")
    rope.only("rope_type", "axial", "default")
    return rope.number("rope_theta", default=own.number("rope_theta", default=10_000.0))


def _check(config: PixtralConfig, own: Fields) -> None:
    check_heads(config, own.where)
    head_dim = config.hidden_size // config.num_heads
    if head_dim % 4:
        raise ModelError(f"{own.where}: heads have {head_dim} dimensions, which do not divide into pairs of two kinds")
    own.only("head_dim", head_dim)
