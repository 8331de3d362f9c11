"""A small Gemma 4."""

from __future__ import annotations

from typing import Any, Final

from forebay.families.base.shape import Shape
from forebay.families.config.vision.small import SmallPictures, encoder_fields

_PATCH_SIZE, _MERGE, _NUM_TOKENS = 8, 2, 70
_IMAGE, _BEGIN, _END = "<|image|>", "<|image>", "<image|>"


def _around(shape: Shape) -> dict[str, Any]:
    own = {
        "model_type": "gemma4_vision",
        "num_key_value_heads": shape.num_heads,
        "head_dim": shape.head_dim,
        "patch_size": _PATCH_SIZE,
        "pooling_kernel_size": _MERGE,
        "position_embedding_size": _NUM_TOKENS * _MERGE,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "standardize": True,
        "use_clipped_linears": True,
    }
    return {
        "boi_token_id": shape.vocab_size + 1,
        "eoi_token_id": shape.vocab_size + 2,
        "vision_config": {**encoder_fields(shape), **own},
    }


SMALL_GEMMA4: Final = SmallPictures(
    tokens=(_IMAGE, _BEGIN, _END),
    around=_around,
    inside=lambda shape: {
        "use_bidirectional_attention": "vision",
        "vocab_size_per_layer_input": shape.vocab_size + 3,
    },
    files={
        "processor_config.json": {
            "processor_class": "Gemma4Processor",
            "image_seq_length": _NUM_TOKENS,
            "image_processor": {
                "image_processor_type": "Gemma4ImageProcessor",
                **dict.fromkeys(("do_convert_rgb", "do_resize", "do_rescale"), True),
                "do_normalize": False,
                "image_mean": [0.0, 0.0, 0.0],
                "image_std": [1.0, 1.0, 1.0],
                "max_soft_tokens": _NUM_TOKENS,
                "patch_size": _PATCH_SIZE,
                "pooling_kernel_size": _MERGE,
                "resample": 3,
                "rescale_factor": 1 / 255,
            },
        },
    },
)
