"""Granite Swash in GGUF, dense or with experts: the format has one architecture for both. Layers rotate with one base,
or not at all."""

from __future__ import annotations

from typing import Final

import numpy as np

from forebay.base.errors import brief
from forebay.families.base.architecture import PRE_NORM, Architecture, Header, Tensors
from forebay.families.parts.gguf.joined_experts import EXPERTS, SCALES
from forebay.formats.turned_experts import GATE_UP

_ROTATED: Final = "attention.rope_pattern"
_SHARED: Final = "expert_shared_feed_forward_length"


def _configure(header: Header) -> None:
    config = header.config
    config["layer_types"] = header.windowed()
    config["layer_rope_theta"] = _thetas(header)
    config["num_key_value_heads"] = header.kv_heads()
    experts = config.pop("num_experts", 0)
    if experts:
        config["model_type"] = "granitemoe_swa"
        config["num_local_experts"] = experts
        config["shared_intermediate_size"] = header.own.get(_SHARED, 0)
    else:
        config.pop("num_experts_per_tok", None)


def _thetas(header: Header) -> list[float]:
    """Return the base of each layer's rotary embedding, 0 for a layer without one. Raises ModelError for a pattern that
    has no flag for each layer."""
    pattern = header.own.get(_ROTATED, [1] * len(header.layers))
    flags = pattern.tolist() if isinstance(pattern, np.ndarray) else pattern
    if not isinstance(flags, list) or len(flags) != len(header.layers) or not set(flags) <= {0, 1}:
        raise header.wrong(f"{_ROTATED} is {brief(flags)}, not a flag for each layer")
    theta = header.config.get("rope_theta", 10_000.0)
    return [theta if flag else 0 for flag in flags]


def _restore(tensors: Tensors) -> Tensors:
    """Give sinks a name without a suffix."""
    return {name.replace(".sinks.weight", ".sinks"): tensor for name, tensor in tensors.items()}


ARCHITECTURES: Final = {
    "granite_swa": Architecture(
        interleaved_rope=True,
        block_names={
            **PRE_NORM,
            **EXPERTS,
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_up_exps": f"block_sparse_moe.experts.{{}}.{GATE_UP}",
            "ffn_up_shexp": "shared_mlp.input_linear",
        },
        keys={**SCALES, "attention.sliding_window": "sliding_window"},
        checked=("attention.sliding_window_pattern", _ROTATED, "attention.head_count_kv", _SHARED),
        configure=_configure,
        restore=_restore,
    ),
}
