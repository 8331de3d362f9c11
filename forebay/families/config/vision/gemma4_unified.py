"""The pictures of gemma4_unified (Gemma 4 12B), which have no encoder: a token is made of its pixels alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from forebay.base.pixels import CHANNELS
from forebay.families.base.fields import Fields
from forebay.families.base.options import unknown_options
from forebay.families.config.vision.base import MAX_TILE, Vision, VisionConfig, pixel_numbers
from forebay.families.config.vision.gemma4 import ScaledVisionConfig, check_image_size, image_fields

_SIZES: Final = {"patch_size": 16, "pooling_kernel_size": 3}
_HARMLESS: Final = frozenset[str]()
# The name of the projection in published files, and in those of transformers 5.
_PROJECTION: Final = ("embed_vision.embedding_projection", "embed_vision.multimodal_embedder.embedding_projection")


@dataclass(frozen=True, kw_only=True, slots=True)
class UnifiedVisionConfig(ScaledVisionConfig):
    """A patch is what becomes one token. Its pixels are normed, go through a linear layer and a norm, and get two
    learned positions and a norm, the one layer here; `rms_eps` is of the norm behind it."""

    rms_eps: float

    def here(self, stored: str) -> str:
        return VisionConfig.here(self, stored).replace(*_PROJECTION) if _PROJECTION[1] not in stored else stored

    @property
    def layer_products(self) -> tuple[int, int]:
        """Return the products of a patch in the one layer, and none of pairs: no patch sees another."""
        return self.hidden_size * CHANNELS * self.patch_size**2, 0

    def outer_products(self, output_size: int) -> float:
        """Return the products of a patch in its projection."""
        return self.hidden_size * output_size


def gemma4_unified(fields: Fields, processor: Fields, vocab_size: int) -> Vision:
    """Read the part for pictures of a gemma4_unified model. Defaults are those of transformers' classes."""
    own = Fields.of_file(fields.get("vision_config"), f"{fields.where}: vision_config")
    processor = processor.replaced(do_normalize=processor.flag("do_normalize", default=False))
    rescale, mean, std = pixel_numbers(processor, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    patch, factor = (own.size(name, default=size, most=MAX_TILE) for name, size in _SIZES.items())
    width = own.size("mm_embed_dim", default=3840)
    own.only("model_patch_size", patch * factor)
    config = UnifiedVisionConfig(
        **image_fields(fields, processor, vocab_size, attention="vision"),
        patch_size=patch * factor,
        merge=1,
        hidden_size=width,
        intermediate_size=width,
        num_layers=1,
        num_heads=1,
        norm_eps=1e-5,  # of transformers' LayerNorms, whatever the file has
        rms_eps=own.number("rms_norm_eps", default=1e-6),
        num_positions=own.size("mm_posemb_size", default=1120),
        rescale=rescale,
        mean=mean,
        std=std,
    )
    own.only("output_proj_dims", width)
    for name, ours in (("patch_size", patch), ("pooling_kernel_size", factor)):
        if processor.get(name, ours) != ours:
            raise processor.wrong(name, f"{ours}, as the encoder has it")
    check_image_size(config, own.where)
    return config, tuple(f"vision_config.{name}" for name in unknown_options(own, _HARMLESS))
