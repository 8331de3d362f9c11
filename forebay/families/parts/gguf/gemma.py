"""Names of Gemma's norms, and their scales."""

from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import ATTENTION, MLP, Header, Tensors
from forebay.formats.stored_tensor import less_one

GEMMA_NAMES: Final = {
    **ATTENTION,
    **MLP,
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def set_scalar(header: Header, *, largest: int) -> None:
    """Add the number whose root divides the scores: the size of a head. In the model of `largest` layers it is the
    hidden size divided by the number of heads, because its heads are smaller than that."""
    config = header.config
    hidden_size, heads = config.get("hidden_size"), config.get("num_attention_heads")
    scalar = config.get("head_dim")
    if config.get("num_hidden_layers") == largest and type(hidden_size) is type(heads) is int and heads:
        scalar = hidden_size // heads
    config["query_pre_attn_scalar"] = scalar


def restore_norms(tensors: Tensors) -> Tensors:
    """Norm weights are stored as they are used, not as differences from 1."""
    return {name: less_one(tensor) if name.endswith("norm.weight") else tensor for name, tensor in tensors.items()}
