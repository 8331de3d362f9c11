from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import EXPERTS, PRE_NORM, Architecture, Tensors
from forebay.families.parts.gguf.latent import SHARED_EXPERTS
from forebay.formats.stored_tensor import ComputedTensor

_CORRECTION: Final = ".moe_statics.e_score_correction"


def _restore(tensors: Tensors) -> Tensors:
    """The correction of the experts' scores is a row, whose name has no suffix."""
    restored: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith(f"{_CORRECTION}.bias") and len(tensor.shape) == 1:
            tensor = ComputedTensor((1, *tensor.shape), [tensor], tensor.pieces)
        restored[name.replace(f"{_CORRECTION}.bias", f"{_CORRECTION}_bias")] = tensor
    return restored


ARCHITECTURES: Final = {
    "ernie4_5-moe": Architecture(
        block_names={**PRE_NORM, **EXPERTS, **SHARED_EXPERTS, "exp_probs_b": f"mlp{_CORRECTION}"},
        keys={
            "expert_shared_count": "moe_num_shared_experts",
            "interleave_moe_layer_step": "moe_layer_interval",
            "leading_dense_block_count": "moe_layer_start_index",
        },
        # What llama.cpp's converter computes from other fields: the weights say the size, too.
        checked=("expert_shared_feed_forward_length",),
        restore=_restore,
    )
}
