"""Small models of Qwen: 2-VL, 2.5-VL, 3-VL, 3.5 and 4."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from forebay.families.base.shape import Shape
from forebay.families.config.vision.small import SmallPictures

_PATCH_SIZE, _MERGE, _POSITIONS = 8, 2, 64
_TOKEN_PIXELS: Final = (_PATCH_SIZE * _MERGE) ** 2


def _encoder(shape: Shape, **own: Any) -> dict[str, Any]:
    """Fields of an encoder, and those of its type's `own`."""
    return {
        "vision_config": {
            "depth": shape.num_layers,
            "hidden_size": shape.hidden_size,
            "intermediate_size": 3 * shape.hidden_size,
            "num_heads": shape.num_heads,
            "out_hidden_size": shape.hidden_size,
            "patch_size": _PATCH_SIZE,
            "spatial_merge_size": _MERGE,
            "temporal_patch_size": 2,
            **own,
        },
    }


def _by_ratio(shape: Shape) -> dict[str, Any]:
    """Fields of an encoder whose feed-forward layers have a multiple of its width, which has another name."""
    (own,) = _encoder(shape, embed_dim=shape.hidden_size, mlp_ratio=3).values()
    return {"vision_config": {name: own[name] for name in own if name not in ("intermediate_size", "out_hidden_size")}}


def _with_windows(shape: Shape) -> dict[str, Any]:
    """Fields of an encoder with windows of two tokens squared in all layers but the last."""
    return _encoder(shape, window_size=2 * _PATCH_SIZE * _MERGE, fullatt_block_indexes=[shape.num_layers - 1])


def _with_features(shape: Shape) -> dict[str, Any]:
    """Fields of an encoder whose first two layers leave features."""
    layers = list(range(min(2, shape.num_layers)))
    return _encoder(shape, num_position_embeddings=_POSITIONS, deepstack_visual_indexes=layers)


def _rope(shape: Shape, **own: Any) -> dict[str, Any]:
    """Fields of the language model's rope, with its sections, and those of its type's `own`."""
    half = int(shape.head_dim * own.get("partial_rotary_factor", 1)) // 2
    sections = [half - 2 * (half // 3), half // 3, half // 3]
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": sections, **own}}


def _small(
    processor: str, *, around: Callable[[Shape], Mapping[str, Any]], inside: Callable[[Shape], Mapping[str, Any]]
) -> SmallPictures:
    """Describe a small model of the type that has the `processor`."""
    return SmallPictures(
        tokens=("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
        written="<|vision_start|><|image_pad|><|vision_end|>",
        files={
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
            "processor_config.json": {"processor_class": processor},
        },
        around=around,
        inside=inside,
    )


SMALL_QWEN2_VL: Final = _small("Qwen2VLProcessor", around=_by_ratio, inside=_rope)
SMALL_QWEN2_5_VL: Final = _small("Qwen2_5_VLProcessor", around=_with_windows, inside=_rope)
SMALL_QWEN3_VL: Final = _small("Qwen3VLProcessor", around=_with_features, inside=partial(_rope, mrope_interleaved=True))
SMALL_QWEN3_5: Final = _small(
    "Qwen3VLProcessor",
    around=partial(_encoder, num_position_embeddings=_POSITIONS),
    inside=partial(_rope, mrope_interleaved=True, partial_rotary_factor=0.25),
)
