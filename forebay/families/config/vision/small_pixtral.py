"""A small Mistral 3."""

from __future__ import annotations

from typing import Any, Final

from forebay.families.base.shape import Shape
from forebay.families.config.vision.pixtral import MEAN, STD
from forebay.families.config.vision.small import SmallPictures, encoder_fields

_IMAGE_SIZE, _PATCH_SIZE, _MERGE = 128, 8, 2


def _around(shape: Shape) -> dict[str, Any]:
    own = {"model_type": "pixtral", "image_size": _IMAGE_SIZE, "patch_size": _PATCH_SIZE, "hidden_act": "silu"}
    return {
        "spatial_merge_size": _MERGE,
        "vision_feature_layer": -1,
        "vision_config": {**encoder_fields(shape), **own},
    }


SMALL_PIXTRAL: Final = SmallPictures(
    tokens=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    around=_around,
    files={
        "preprocessor_config.json": {
            "image_processor_type": "PixtralImageProcessor",
            "image_mean": list(MEAN),
            "image_std": list(STD),
            "patch_size": {"height": _PATCH_SIZE, "width": _PATCH_SIZE},
            "resample": 3,
            "size": {"longest_edge": _IMAGE_SIZE},
        },
        "processor_config.json": {
            "processor_class": "PixtralProcessor",
            "patch_size": _PATCH_SIZE,
            "spatial_merge_size": _MERGE,
        },
    },
)
