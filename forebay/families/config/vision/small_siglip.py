"""Small SmolVLM and Idefics 3."""

from __future__ import annotations

from typing import Any, Final

from forebay.families.base.shape import Shape
from forebay.families.config.vision.small import SmallPictures, encoder_fields

_TILE_SIZE, _PATCH_SIZE, _SCALE_FACTOR = 64, 8, 2
_MOST_TILES: Final = 4  # in a row
_MARKS: Final = tuple(
    f"<row_{row}_col_{col}>" for row in range(1, _MOST_TILES + 1) for col in range(1, _MOST_TILES + 1)
)


def small_siglip(model_type: str, processor: str) -> SmallPictures:
    """Describe a small model of the type, whose processors' names begin with `processor`."""
    steps = ("do_convert_rgb", "do_resize", "do_image_splitting", "do_rescale", "do_normalize", "do_pad")
    halves = [0.5, 0.5, 0.5]
    return SmallPictures(
        tokens=("<image>", "<fake_token_around_image>", "<global-img>", *_MARKS),
        around=lambda shape: _around(model_type, shape),
        files={
            "preprocessor_config.json": {
                "image_processor_type": f"{processor}ImageProcessor",
                **dict.fromkeys(steps, True),
                "image_mean": halves,
                "image_std": halves,
                "max_image_size": {"longest_edge": _TILE_SIZE},
                "resample": 1,
                "rescale_factor": 1 / 255,
                "size": {"longest_edge": _MOST_TILES * _TILE_SIZE},
            },
            "processor_config.json": {
                "processor_class": f"{processor}Processor",
                "image_seq_len": (_TILE_SIZE // _PATCH_SIZE // _SCALE_FACTOR) ** 2,
            },
        },
    )


def _around(model_type: str, shape: Shape) -> dict[str, Any]:
    own = {"model_type": f"{model_type}_vision", "image_size": _TILE_SIZE, "patch_size": _PATCH_SIZE}
    return {"scale_factor": _SCALE_FACTOR, "vision_config": {**encoder_fields(shape), **own}}
