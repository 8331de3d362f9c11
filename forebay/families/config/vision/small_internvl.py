"""A small InternVL."""

from __future__ import annotations

from typing import Any, Final

from forebay.families.base.shape import Shape
from forebay.families.config.vision.small import SmallPictures, encoder_fields

_TILE_SIZE, _PATCH_SIZE = 64, 8


def _around(shape: Shape) -> dict[str, Any]:
    own = {"model_type": "internvl_vision", "image_size": [_TILE_SIZE] * 2, "patch_size": [_PATCH_SIZE] * 2}
    return {"downsample_ratio": 0.5, "vision_config": {**encoder_fields(shape), **own, "attention_bias": True}}


SMALL_INTERNVL: Final = SmallPictures(
    tokens=("<IMG_CONTEXT>", "<img>", "</img>"),
    around=_around,
    files={
        "preprocessor_config.json": {
            "image_processor_type": "GotOcr2ImageProcessor",
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 4,
            "resample": 3,
            "size": {"height": _TILE_SIZE, "width": _TILE_SIZE},
        },
        "processor_config.json": {
            "processor_class": "InternVLProcessor",
            "image_seq_length": (_TILE_SIZE // _PATCH_SIZE // 2) ** 2,
        },
    },
)
