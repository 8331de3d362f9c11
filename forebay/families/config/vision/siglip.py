"""SigLIP with a pixel shuffle behind it: the encoder of SmolVLM and Idefics 3, whose tiles are squares of one size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from forebay.base.errors import ModelError
from forebay.families.base.fields import MAX_LAYERS, Fields
from forebay.families.base.options import unknown_options
from forebay.families.config.vision.base import MAX_TILE, SquareTileConfig, Vision, check_heads, pixel_numbers

# About how pictures become tiles, which the server has from the image processor's file.
_HARMLESS: Final = frozenset({"max_image_size", "size", "tie_word_embeddings", "use_base_siglip"})


@dataclass(frozen=True, kw_only=True, slots=True)
class SiglipConfig(SquareTileConfig):
    """SigLIP of one tile size. arXiv 2303.15343; the pixel shuffle is that of arXiv 2408.12637."""


def siglip(fields: Fields, processor: Fields, vocab_size: int) -> Vision:
    """Read the encoder of a model. Defaults are those of transformers' classes."""
    own = Fields.of_file(fields.get("vision_config"), f"{fields.where}: vision_config")
    own.only("hidden_act", "gelu_pytorch_tanh")
    own.only("num_channels", 3)
    rescale, mean, std = pixel_numbers(processor)
    config = SiglipConfig(
        kind=str(fields.get("model_type")),
        placeholder=fields.size("image_token_id", default=128_257, least=0, most=vocab_size - 1),
        image_size=own.size("image_size", default=224, most=MAX_TILE),
        patch_size=own.size("patch_size", default=32, most=MAX_TILE),
        merge=fields.size("scale_factor", default=2, most=MAX_TILE),
        hidden_size=own.size("hidden_size", default=1152),
        intermediate_size=own.size("intermediate_size", default=3072),
        num_layers=own.size("num_hidden_layers", default=12, most=MAX_LAYERS),
        num_heads=own.size("num_attention_heads", default=16),
        norm_eps=own.number("layer_norm_eps", default=1e-6),
        rescale=rescale,
        mean=mean,
        std=std,
    )
    _check_sizes(config, own.where)
    return config, tuple(f"vision_config.{name}" for name in unknown_options(own, _HARMLESS))


def _check_sizes(config: SiglipConfig, where: str) -> None:
    check_heads(config, where)
    if not config.side or config.side % config.merge:
        raise ModelError(
            f"{where}: a tile of {config.image_size} pixels has {config.side} patches of {config.patch_size} in a row, "
            f"which do not divide into groups of {config.merge} (scale_factor)"
        )
