"""A small Gemma 3."""

from __future__ import annotations

from typing import Any, Final

from forebay.families.base.shape import Shape
from forebay.families.config.vision.small import SmallPictures, encoder_fields

_TILE_SIZE, _PATCH_SIZE, _NUM_TOKENS = 64, 8, 16
_BEGIN: Final = "<start_of_image>"


def _around(shape: Shape) -> dict[str, Any]:
    own = {
        "model_type": "siglip_vision_model",
        "image_size": _TILE_SIZE,
        "patch_size": _PATCH_SIZE,
        "vision_use_head": False,
    }
    return {
        "boi_token_index": shape.vocab_size + 1,
        "eoi_token_index": shape.vocab_size + 2,
        "mm_tokens_per_image": _NUM_TOKENS,
        "vision_config": {**encoder_fields(shape), **own},
    }


SMALL_GEMMA3: Final = SmallPictures(
    tokens=("<image_soft_token>", _BEGIN, "<end_of_image>"),
    around=_around,
    files={
        "preprocessor_config.json": {
            "image_processor_type": "Gemma3ImageProcessor",
            **dict.fromkeys(("do_convert_rgb", "do_resize", "do_rescale", "do_normalize"), True),
            "do_pan_and_scan": None,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "resample": 2,
            "rescale_factor": 1 / 255,
            "size": {"height": _TILE_SIZE, "width": _TILE_SIZE},
        },
        "processor_config.json": {"processor_class": "Gemma3Processor", "image_seq_length": _NUM_TOKENS},
    },
    written=_BEGIN,
)
