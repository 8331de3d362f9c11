"""SigLIP 2 for tiles of any ratio, with an MLP behind it: the encoder of LFM2-VL."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from forebay.base.errors import ModelError
from forebay.base.pixels import CHANNELS, Size, num_tokens
from forebay.families.base.fields import MAX_LAYERS, Fields
from forebay.families.base.options import unknown_options
from forebay.families.config.vision.base import MAX_TILE, Vision, VisionConfig, check_heads, pixel_numbers

DEFAULT_MAX_TOKENS: Final = 256  # of an image that is not split
DEFAULT_TILE_SIZE: Final = 512
_MOST_TOKENS: Final = 1 << 14
# Whether the encoder pools a tile to one vector, which is not used.
_HARMLESS: Final = frozenset({"vision_use_head"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Siglip2Config(VisionConfig):
    """The learned positions are of `position_side` squared patches, and are interpolated to those of a tile. A tile has
    at most `most_tokens`. A token becomes `projector_size` numbers in between, after a LayerNorm with
    `projector_norm`. arXiv 2502.14786."""

    position_side: int
    most_tokens: int
    projector_size: int
    projector_norm: bool
    projector_bias: bool

    @property
    def max_tokens(self) -> int:
        return self.most_tokens

    @property
    def max_edge(self) -> int:
        return self.most_tokens * self.token_edge

    def outer_products(self, output_size: int) -> float:
        """Return the products that a patch takes in its embedding, and its share of those of a token's projector."""
        own = self.hidden_size * (CHANNELS * self.patch_size**2 + self.projector_size)
        return own + self.projector_size * output_size / self.merge**2


def siglip2(fields: Fields, processor: Fields, vocab_size: int) -> Vision:
    """Read the encoder of a model. Defaults are those of transformers' classes."""
    own = Fields.of_file(fields.get("vision_config"), f"{fields.where}: vision_config")
    own.only("model_type", "siglip2_vision_model")
    own.only("hidden_act", "gelu_pytorch_tanh")
    own.only("num_channels", 3)
    fields.only("projector_hidden_act", "gelu")
    rescale, mean, std = pixel_numbers(processor)
    patch_size = own.size("patch_size", default=16, most=MAX_TILE)
    merge = fields.size("downsample_factor", default=2, most=MAX_TILE)
    image = fields.renamed({"image_token_index": "image_token_id"})
    config = Siglip2Config(
        kind=str(fields.get("model_type")),
        placeholder=image.size("image_token_id", default=396, least=0, most=vocab_size - 1),
        patch_size=patch_size,
        merge=merge,
        hidden_size=own.size("hidden_size", default=768),
        intermediate_size=own.size("intermediate_size", default=3072),
        num_layers=own.size("num_hidden_layers", default=12, most=MAX_LAYERS),
        num_heads=own.size("num_attention_heads", default=12),
        norm_eps=own.number("layer_norm_eps", default=1e-6),
        rescale=rescale,
        mean=mean,
        std=std,
        position_side=_side(own),
        most_tokens=_most_tokens(processor, patch_size * merge),
        projector_size=fields.size("projector_hidden_size", default=2560),
        projector_norm=fields.flag("projector_use_layernorm", default=True),
        projector_bias=fields.flag("projector_bias", default=True),
    )
    check_heads(config, own.where)
    return config, tuple(f"vision_config.{name}" for name in unknown_options(own, _HARMLESS))


def _side(own: Fields) -> int:
    count = own.size("num_patches", default=256, most=MAX_TILE**2)
    side = math.isqrt(count)
    if side * side != count:
        raise ModelError(f"{own.where}: num_patches is {count}, which is no square: positions have rows and columns")
    return side


def _most_tokens(processor: Fields, token_edge: int) -> int:
    """Tokens of the largest tile: one of a grid, or an image that is not split."""
    whole = processor.size("max_image_tokens", default=DEFAULT_MAX_TOKENS, most=_MOST_TOKENS)
    edge = processor.size("tile_size", default=DEFAULT_TILE_SIZE, most=MAX_TILE)
    size: Size = (edge, edge)
    return max(whole, num_tokens(size, token_edge))
