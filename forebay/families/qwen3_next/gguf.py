from __future__ import annotations

from typing import Final

import numpy as np

from forebay.base.errors import ModelError
from forebay.families.base.architecture import Architecture, Tensors
from forebay.families.parts.gguf.gated_delta import CHECKED, KEYS, configure, restore, taken
from forebay.families.parts.gguf.shared_experts import EXPERT_NAMES
from forebay.families.qwen3_next.config import Qwen3NextConfig
from forebay.formats.stored_tensor import one_below_the_other


def _reorder(tensors: Tensors, config: Qwen3NextConfig) -> Tensors:
    """q, k and v of all heads, and the gates, are stored one after the other instead of by key head; the fused layer is
    as old files have it."""
    heads, keys, values = config.delta.num_key_heads, config.delta.key_size, config.delta.value_size
    starts = np.cumsum([0, keys, keys, values])
    parts = zip(starts, (keys, keys, values, values), strict=True)
    order = np.concatenate([first + np.arange(size).reshape(heads, -1) for first, size in parts], axis=1).reshape(-1)
    reordered = dict(tensors)
    for name in tensors:
        if name.endswith(".in_proj_qkv.weight"):
            stem = name.removesuffix("qkv.weight")
            gate = reordered.pop(f"{stem}z.weight", None)
            if gate is None:
                raise ModelError(f"{name}: there is no gate")
            reordered[f"{stem}qkvz.weight"] = taken(one_below_the_other(reordered.pop(name), gate), order, 0)
    return reordered


ARCHITECTURES: Final = {
    "qwen3next": Architecture(
        block_names={
            **EXPERT_NAMES,
            "ssm_in": "linear_attn.in_proj_qkvz",
            "ssm_ba": "linear_attn.in_proj_ba",
        },
        keys=KEYS,
        checked=CHECKED,
        configure=configure,
        reorder=_reorder,
        restore=restore,
    ),
}
