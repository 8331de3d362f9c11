"""Names of GLM 4 9B in GGUF. Files made of its first release have queries, keys and values in one tensor."""

from __future__ import annotations

from typing import Final

from forebay.base.errors import ModelError
from forebay.families.base.architecture import PROJECTIONS, Architecture, Header, Tensors, within
from forebay.families.parts.gguf.joined_mlp import JOINED_MLP
from forebay.families.parts.gguf.partial_rotary import configure
from forebay.families.parts.partial_rotary import PartialRotaryConfig
from forebay.formats.gguf_tensor import GgufStored

_JOINED: Final = "self_attn.qkv_proj."
_NAMES: Final = {
    **within("self_attn", {**PROJECTIONS, "attn_qkv": "qkv_proj"}),
    **JOINED_MLP,
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def _configure(header: Header) -> None:
    configure(header)
    header.config["attention_bias"] = header.config["attention_bias"] or header.has("attn_qkv.bias")


def _apart(tensors: Tensors, config: PartialRotaryConfig) -> Tensors:
    """Take queries, keys and values of one tensor apart. Raises ModelError for another number of rows."""
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    found: Tensors = {}
    for name, tensor in tensors.items():
        if _JOINED not in name:
            found[name] = tensor
            continue
        if not isinstance(tensor, GgufStored) or tensor.shape[0] != queries + 2 * keys:
            raise ModelError(f"{name} has the shape {tensor.shape}, not {queries} + 2 x {keys} rows")
        bounds = (0, queries, queries + keys, queries + 2 * keys)
        for part, first, stop in zip("qkv", bounds, bounds[1:], strict=False):
            found[name.replace(_JOINED, f"self_attn.{part}_proj.")] = tensor.part(first, stop)
    return found


ARCHITECTURES: Final = {
    "chatglm": Architecture(block_names=_NAMES, checked=("rope.dimension_count",), configure=_configure, reorder=_apart)
}
