from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import ATTENTION, GATED, Architecture, Header, Tensors, expert_names

_NAMES: Final = {
    **ATTENTION,
    "attn_sinks": "self_attn.sinks",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
    **expert_names("mlp", GATED),
}


def _configure(header: Header) -> None:
    config = header.config
    config["intermediate_size"] = config.pop("moe_intermediate_size", config.get("intermediate_size"))
    scaling = config["rope_scaling"]
    if scaling is not None and scaling["rope_type"] == "yarn":
        scaling["truncate"] = False
        header.yarn_options()


def _restore(tensors: Tensors) -> Tensors:
    """Sinks have no suffix."""
    return {name.replace(".sinks.weight", ".sinks"): tensor for name, tensor in tensors.items()}


ARCHITECTURES: Final = {
    "gpt-oss": Architecture(
        block_names=_NAMES,
        keys={"attention.sliding_window": "sliding_window"},
        checked=("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
        configure=_configure,
        restore=_restore,
    ),
}
