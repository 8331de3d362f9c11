"""A small Muse Glimmer with its encoder."""

from __future__ import annotations

from typing import Any, Final

from forebay.families.base.shape import Shape
from forebay.families.config.vision.small import SmallPictures, encoder_fields

_PATCH_SIZE, _MERGE, _SIDE, _FRAMES, _NUM_TOKENS = 8, 2, 8, 2, 64


def _around(shape: Shape) -> dict[str, Any]:
    own = {"model_type": "muse_glimmer_vision", "patch_size": _PATCH_SIZE, "patch_temporal": _FRAMES}
    sides = {"merge_size": _MERGE, "pos_emb_height": _SIDE, "pos_emb_width": _SIDE}
    return {
        "out_hidden_size": _MERGE**2 * shape.hidden_size,
        "projector_hidden_size": 2 * shape.hidden_size,
        "vision_config": {**encoder_fields(shape), **own, **sides},
    }


SMALL_MUSE_GLIMMER: Final = SmallPictures(
    tokens=("<|patch|>", "<|image_start|>", "<|image_end|>"),
    around=_around,
    files={
        "preprocessor_config.json": {
            "image_processor_type": "MuseGlimmerImageProcessor",
            "max_image_tokens": _NUM_TOKENS,
            "merge_size": _MERGE,
            "patch_size": _PATCH_SIZE,
            "resample": 1,
            "temporal_patch_size": _FRAMES,
        },
    },
)
