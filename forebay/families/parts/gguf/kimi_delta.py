"""Names of Kimi's delta rule, and the shapes of its weights."""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from forebay.families.base.architecture import Tensors, within
from forebay.families.parts.gguf.mamba2 import restore_mamba2
from forebay.formats.stored_tensor import ComputedTensor

_CONVOLUTIONS: Final = {f"ssm_conv1d_{part}": f"{part}_conv1d" for part in "qkv"}
_GATES: Final = {f"ssm_{gate}_{part}": f"{gate}_{part}_proj" for gate in "fg" for part in "ab"}
DELTA_NAMES: Final = within(
    "self_attn",
    {
        "attn_q": "q_proj",
        "attn_k": "k_proj",
        "attn_v": "v_proj",
        **_CONVOLUTIONS,
        **_GATES,
        "ssm_beta": "b_proj",
        "ssm_a": "A_log",
        "ssm_dt": "dt",
        "ssm_norm": "o_norm",
    },
)
DELTA_KEYS: Final = {"ssm.conv_kernel": "linear_conv_kernel_dim", "kda.head_dim": "linear_head_dim"}

_KERNEL: Final = re.compile(r".*\.[qkv]_conv1d\.weight")


def restore_delta(tensors: Tensors) -> Tensors:
    """Restore the shapes of convolution kernels, and decays and biases as `restore_mamba2` does."""
    restored: Tensors = {}
    for name, tensor in restore_mamba2(tensors).items():
        if _KERNEL.fullmatch(name):
            channels = int(np.prod(tensor.shape[:-1]))
            restored[name] = ComputedTensor((channels, 1, tensor.shape[-1]), [tensor], tensor.pieces)
        else:
            restored[name] = tensor
    return restored
