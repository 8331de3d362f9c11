"""SigLIP with averages of squares behind it: the encoder of Gemma 3, whose tiles are squares of one size."""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt
from typing import Final

from forebay.base.errors import ModelError
from forebay.base.pixels import CHANNELS
from forebay.families.base.fields import MAX_LAYERS, Fields
from forebay.families.base.options import unknown_options
from forebay.families.config.vision.base import MAX_TILE, Vision, check_heads, pixel_numbers
from forebay.families.config.vision.siglip import SiglipConfig

# The head is for images without a language model: nothing here reads it.
_HARMLESS: Final = frozenset({"vision_use_head"})


@dataclass(frozen=True, kw_only=True, slots=True)
class PooledSiglipConfig(SiglipConfig):
    """An image is one tile, between the tokens `begin` and `end`. The tokens of a tile attend to each other in both
    directions. arXiv 2503.19786, section 2.1."""

    begin: int
    end: int

    @property
    def longest_span(self) -> int:
        return self.num_tokens(self.tile_size)

    def outer_products(self, output_size: int) -> int:
        """Return the products that a patch takes before and behind the layers: a token's are those of one patch."""
        return self.hidden_size * (CHANNELS * self.patch_size**2 + output_size // self.merge**2)


def pooled_siglip(fields: Fields, processor: Fields, vocab_size: int) -> Vision:
    """Read the encoder of a Gemma 3. Defaults are those of transformers' classes."""
    fields = fields.renamed({f"{name}_token_id": f"{name}_token_index" for name in ("image", "boi", "eoi")})
    own = Fields.of_file(fields.get("vision_config"), f"{fields.where}: vision_config")
    own.only("hidden_act", "gelu_pytorch_tanh")
    own.only("num_channels", 3)
    image_size = own.size("image_size", default=224, most=MAX_TILE)
    patch_size = own.size("patch_size", default=16, most=MAX_TILE)
    rescale, mean, std = pixel_numbers(processor)
    config = PooledSiglipConfig(
        kind=str(fields.get("model_type")),
        placeholder=_token(fields, "image_token_index", 262_144, vocab_size),
        begin=_token(fields, "boi_token_index", 255_999, vocab_size),
        end=_token(fields, "eoi_token_index", 256_000, vocab_size),
        image_size=image_size,
        patch_size=patch_size,
        merge=_merge(fields, image_size // patch_size),
        hidden_size=own.size("hidden_size", default=768),
        intermediate_size=own.size("intermediate_size", default=3072),
        num_layers=own.size("num_hidden_layers", default=12, most=MAX_LAYERS),
        num_heads=own.size("num_attention_heads", default=12),
        norm_eps=own.number("layer_norm_eps", default=1e-6),
        rescale=rescale,
        mean=mean,
        std=std,
    )
    check_heads(config, own.where)
    return config, tuple(f"vision_config.{name}" for name in unknown_options(own, _HARMLESS))


def _token(fields: Fields, name: str, default: int, vocab_size: int) -> int:
    return fields.size(name, default=default, least=0, most=vocab_size - 1)


def _merge(fields: Fields, side: int) -> int:
    """Return the patches on an edge of the square that becomes one token, of a tile with `side` in a row."""
    tokens = fields.size("mm_tokens_per_image", default=256)
    row = isqrt(tokens)
    if row**2 != tokens or not side or side % row:
        raise ModelError(
            f"{fields.where}: mm_tokens_per_image is {tokens}; a tile of {side} x {side} patches must divide into as "
            "many squares"
        )
    return side // row
