"""Names of Gemma 3 in GGUF. Files omit the rotary base of windows and the scale of scores, which llama.cpp assumes."""

from __future__ import annotations

from typing import Final

from forebay.families.architecture import ATTENTION, MLP, Architecture, Header, Tensors
from forebay.formats.stored_tensor import less_one

_27B_LAYERS: Final = 62

_NAMES: Final = {
    **ATTENTION,
    **MLP,
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def _configure(header: Header) -> None:
    config = header.config
    hidden_size, heads = config.get("hidden_size"), config.get("num_attention_heads")
    scalar = config.get("head_dim")
    if config.get("num_hidden_layers") == _27B_LAYERS and type(hidden_size) is type(heads) is int and heads:
        scalar = hidden_size // heads
    config["query_pre_attn_scalar"] = scalar


def _restore(tensors: Tensors) -> Tensors:
    """Norm weights are stored as they are used, not as differences from 1."""
    return {name: less_one(tensor) if name.endswith("norm.weight") else tensor for name, tensor in tensors.items()}


ARCHITECTURES: Final = {
    "gemma3": Architecture(
        block_names=_NAMES,
        keys={
            "attention.sliding_window": "sliding_window",
            "attention.sliding_window_pattern": "sliding_window_pattern",
            "rope.freq_base_swa": "rope_local_base_freq",
        },
        configure=_configure,
        restore=_restore,
    ),
}
