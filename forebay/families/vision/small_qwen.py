"""A small Qwen3-VL, and a small Qwen3.5."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from forebay.families.shape import Shape
from forebay.families.vision.small import SmallPictures

_PATCH_SIZE, _MERGE, _POSITIONS = 8, 2, 64
_TOKEN_PIXELS: Final = (_PATCH_SIZE * _MERGE) ** 2


def _encoder(shape: Shape) -> dict[str, Any]:
    return {
        "vision_config": {
            "depth": shape.num_layers,
            "hidden_size": shape.hidden_size,
            "intermediate_size": 3 * shape.hidden_size,
            "num_heads": shape.num_heads,
            "num_position_embeddings": _POSITIONS,
            "out_hidden_size": shape.hidden_size,
            "patch_size": _PATCH_SIZE,
            "spatial_merge_size": _MERGE,
            "temporal_patch_size": 2,
        },
    }


def _with_features(shape: Shape) -> dict[str, Any]:
    """Fields of an encoder whose first two layers leave features."""
    (own,) = _encoder(shape).values()
    return {"vision_config": {**own, "deepstack_visual_indexes": list(range(min(2, shape.num_layers)))}}


def _rope(shape: Shape, share: float) -> dict[str, Any]:
    """Fields of the language model's rope, with its sections where a `share` of a head is rotated."""
    half = int(shape.head_dim * share) // 2
    sections = [half - 2 * (half // 3), half // 3, half // 3]
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": sections, "mrope_interleaved": True}
    return {"rope_parameters": {**rope, "partial_rotary_factor": share} if share < 1 else rope}


_COMMON: Final[dict[str, Any]] = {
    "tokens": ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
    "written": "<|vision_start|><|image_pad|><|vision_end|>",
    "files": {
        "preprocessor_config.json": {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "merge_size": _MERGE,
            "patch_size": _PATCH_SIZE,
            "resample": 3,
            "size": {"shortest_edge": 4 * _TOKEN_PIXELS, "longest_edge": 16 * _TOKEN_PIXELS},
            "temporal_patch_size": 2,
        },
        "processor_config.json": {"processor_class": "Qwen3VLProcessor"},
    },
}
SMALL_QWEN3_VL: Final = SmallPictures(around=_with_features, inside=partial(_rope, share=1.0), **_COMMON)
SMALL_QWEN3_5: Final = SmallPictures(around=_encoder, inside=partial(_rope, share=0.25), **_COMMON)
