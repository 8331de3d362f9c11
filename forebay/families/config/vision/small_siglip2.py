"""A small LFM2-VL."""

from __future__ import annotations

from typing import Any, Final

from forebay.families.base.shape import Shape
from forebay.families.config.vision.small import SmallPictures, encoder_fields

_TILE_SIZE, _PATCH_SIZE, _MERGE = 64, 8, 2
_MOST_TILES: Final = 10
_MARKS: Final = tuple(
    f"<|img_row_{row}_col_{col}|>"
    for row in range(1, _MOST_TILES + 1)
    for col in range(1, _MOST_TILES + 1)
    if row * col <= _MOST_TILES
)


def _around(shape: Shape) -> dict[str, Any]:
    own = {
        "model_type": "siglip2_vision_model",
        "num_patches": (_TILE_SIZE // _PATCH_SIZE) ** 2,
        "patch_size": _PATCH_SIZE,
        "vision_use_head": False,
    }
    return {
        "downsample_factor": _MERGE,
        "projector_hidden_size": 3 * shape.hidden_size,
        "vision_config": {**encoder_fields(shape), **own},
    }


SMALL_SIGLIP2: Final = SmallPictures(
    tokens=("<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>", *_MARKS),
    around=_around,
    files={
        "preprocessor_config.json": {
            "image_processor_type": "Lfm2VlImageProcessor",
            "do_image_splitting": True,
            "downsample_factor": _MERGE,
            "encoder_patch_size": _PATCH_SIZE,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "max_image_tokens": (_TILE_SIZE // _PATCH_SIZE // _MERGE) ** 2,
            "max_tiles": _MOST_TILES,
            "min_image_tokens": 4,
            "min_tiles": 2,
            "resample": 2,
            "tile_size": _TILE_SIZE,
        },
        "processor_config.json": {"processor_class": "Lfm2VlProcessor"},
    },
)
