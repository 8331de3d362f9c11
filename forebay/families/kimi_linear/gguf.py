from __future__ import annotations

import re
from typing import Final

import numpy as np

from forebay.families.base.architecture import Architecture, Header, Tensors
from forebay.families.config.transformer import FULL, LINEAR
from forebay.families.parts.gguf.latent import CHECKED, KEYS, NAMES, configure_latent, restore_latent
from forebay.families.parts.gguf.mamba2 import restore_mamba2
from forebay.formats.stored_tensor import ComputedTensor

_NAMES: Final = {
    **NAMES,
    "ffn_gate_exps": "mlp.experts.{}.w1",
    "ffn_up_exps": "mlp.experts.{}.w3",
    "ffn_down_exps": "mlp.experts.{}.w2",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "ssm_conv1d_q": "self_attn.q_conv1d",
    "ssm_conv1d_k": "self_attn.k_conv1d",
    "ssm_conv1d_v": "self_attn.v_conv1d",
    "ssm_f_a": "self_attn.f_a_proj",
    "ssm_f_b": "self_attn.f_b_proj",
    "ssm_g_a": "self_attn.g_a_proj",
    "ssm_g_b": "self_attn.g_b_proj",
    "ssm_beta": "self_attn.b_proj",
    "ssm_a": "self_attn.A_log",
    "ssm_dt": "self_attn.dt",
    "ssm_norm": "self_attn.o_norm",
}

_KERNEL: Final = re.compile(r".*\.[qkv]_conv1d\.weight")


def _configure(header: Header) -> None:
    configure_latent(header)
    header.check_sigmoid()
    header.config.update(
        layer_types=header.kinds({"attn_kv_a_mqa": FULL}, LINEAR),
        linear_num_heads=header.config.get("num_attention_heads"),
        norm_topk_prob=True,  # the format has no key for it, and llama.cpp takes it for granted
    )


def _restore(tensors: Tensors) -> Tensors:
    """Kernels and decays have their ones elsewhere."""
    restored: Tensors = {}
    for name, tensor in restore_latent(restore_mamba2(tensors)).items():
        if _KERNEL.fullmatch(name):
            channels = int(np.prod(tensor.shape[:-1]))
            restored[name] = ComputedTensor((channels, 1, tensor.shape[-1]), [tensor], tensor.pieces)
        elif name.endswith(".A_log"):
            restored[name] = ComputedTensor((1, 1, *tensor.shape, 1), [tensor], tensor.pieces)
        else:
            restored[name] = tensor
    return restored


ARCHITECTURES: Final = {
    "kimi-linear": Architecture(
        block_names=_NAMES,
        keys={**KEYS, "ssm.conv_kernel": "linear_conv_kernel_dim", "kda.head_dim": "linear_head_dim"},
        checked=CHECKED,
        configure=_configure,
        restore=_restore,
    ),
}
