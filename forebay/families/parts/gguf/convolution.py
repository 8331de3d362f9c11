"""Names of layers with short convolutions."""

from __future__ import annotations

from typing import Final

import numpy as np

from forebay.families.base.architecture import TOP_NAMES, Header, Tensors
from forebay.families.config.transformer import FULL
from forebay.families.parts.convolution import CONV
from forebay.formats.stored_tensor import ComputedTensor

TOP: Final = {**TOP_NAMES, "token_embd_norm": "model.embedding_norm"}
NAMES: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
}


def configure(header: Header) -> None:
    """Layers without KV heads are convolutions."""
    given, config = header.own.get("attention.head_count_kv"), header.config
    heads = given.tolist() if isinstance(given, np.ndarray) else []
    if not heads or not all(type(count) is int and count in (0, max(heads)) for count in heads):
        raise header.wrong(f"lfm2's KV heads are {str(given)[:80]}, not 0 or one number for each layer")
    config["num_key_value_heads"] = max(heads) or config.get("num_attention_heads")
    config["layer_types"] = [FULL if count else CONV for count in heads]
    config["norm_eps"] = config.pop("rms_norm_eps", None)


def restore(tensors: Tensors) -> Tensors:
    """The kernel of a convolution has a dimension more, and the experts' bias no `.bias` to its name."""
    restored: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("conv.conv.weight"):
            restored[name] = ComputedTensor((tensor.shape[0], 1, *tensor.shape[1:]), [tensor], tensor.pieces)
        else:
            restored[name.replace(".expert_bias.bias", ".expert_bias")] = tensor
    return restored
