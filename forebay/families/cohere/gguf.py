from __future__ import annotations

from typing import Final

from forebay.families.architecture import ATTENTION, MLP, Architecture, Header

COHERE_NAMES: Final = {**ATTENTION, **MLP, "attn_norm": "input_layernorm"}
COHERE_KEYS: Final = {"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"}


def _configure(header: Header) -> None:
    """Complete the configuration from the tensors: whether heads are normed."""
    header.config["use_qk_norm"] = header.has("attn_q_norm.weight")


ARCHITECTURES: Final = {
    "command-r": Architecture(block_names=COHERE_NAMES, keys=COHERE_KEYS, configure=_configure),
}
