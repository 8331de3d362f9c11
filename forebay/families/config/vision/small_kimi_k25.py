"""A small Kimi K2.5."""

from __future__ import annotations

from typing import Any, Final

from forebay.families.base.shape import Shape
from forebay.families.config.vision.small import SmallPictures

_PATCH_SIZE, _SIDE = 8, 8


def _around(shape: Shape) -> dict[str, Any]:
    return {
        "vision_config": {
            "vt_hidden_size": shape.hidden_size,
            "vt_intermediate_size": 3 * shape.hidden_size,
            "vt_num_hidden_layers": shape.num_layers,
            "vt_num_attention_heads": shape.num_heads,
            "init_pos_emb_height": _SIDE,
            "init_pos_emb_width": _SIDE,
            "merge_kernel_size": [2, 2],
            "mm_hidden_size": shape.hidden_size,
            "patch_size": _PATCH_SIZE,
        },
    }


SMALL_KIMI_K25: Final = SmallPictures(
    tokens=("<|media_pad|>", "<|media_begin|>", "<|media_content|>", "<|media_end|>"),
    written="<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
    around=_around,
    files={
        "preprocessor_config.json": {
            "media_proc_cfg": {
                "image_mean": [0.5] * 3,
                "image_std": [0.5] * 3,
                "in_patch_limit": 256,
                "merge_kernel_size": 2,
                "patch_limit_on_one_side": 64,
                "patch_size": _PATCH_SIZE,
            },
        },
    },
)
