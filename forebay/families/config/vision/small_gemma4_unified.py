"""A small gemma4_unified, whose images have no encoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from forebay.families.base.shape import Shape
from forebay.families.config.vision.small_gemma4 import SMALL_GEMMA4

_PATCH_SIZE, _MERGE, _NUM_TOKENS = 8, 2, 70


def _around(shape: Shape) -> dict[str, Any]:
    return {
        "boi_token_id": shape.vocab_size + 1,
        "eoi_token_id": shape.vocab_size + 2,
        "vision_config": {
            "model_type": "gemma4_unified_vision",
            "patch_size": _PATCH_SIZE,
            "pooling_kernel_size": _MERGE,
            "mm_embed_dim": shape.hidden_size,
            "mm_posemb_size": _NUM_TOKENS,
            "output_proj_dims": shape.hidden_size,
        },
    }


_FILE: Final = "processor_config.json"
_PROCESSOR: Final = SMALL_GEMMA4.files[_FILE]
SMALL_GEMMA4_UNIFIED: Final = replace(
    SMALL_GEMMA4,
    around=_around,
    inside=lambda shape: {"use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 0},
    files={
        _FILE: {
            **_PROCESSOR,
            "processor_class": "Gemma4UnifiedProcessor",
            "image_processor": {
                **_PROCESSOR["image_processor"],
                "image_processor_type": "Gemma4UnifiedImageProcessor",
                "patch_size": _PATCH_SIZE,
                "pooling_kernel_size": _MERGE,
            },
        },
    },
)
