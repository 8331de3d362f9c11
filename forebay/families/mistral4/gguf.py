"""Names of Mistral 4 in GGUF. Files of the converter say no scale of queries: they have transformers' default."""

from __future__ import annotations

from typing import Final

from forebay.base.errors import brief
from forebay.families.base.architecture import EXPERTS, Architecture, Header
from forebay.families.parts.gguf.latent import (
    CHECKED,
    KEYS,
    NAMES,
    configure_latent,
    restore_latent,
    yarn_amplitude,
)
from forebay.families.parts.query_scale import DEFAULT_BETA

_SOFTMAX: Final = 1  # llama.cpp's number of that gating function
_JOINED: Final = {"ffn_gate_up_exps": "mlp.experts.{}.gate_up_proj"}


def _configure(header: Header) -> None:
    configure_latent(header)
    own, config = header.own, header.config
    if own.get("expert_gating_func", _SOFTMAX) != _SOFTMAX:
        raise header.wrong(f"the expert gating function {brief(own['expert_gating_func'])} is not supported")
    config["n_routed_experts"] = config.pop("num_experts", None)
    config["norm_topk_prob"] = bool(own.get("expert_weights_norm", False))
    beta = config.pop("llama_4_scaling_beta", DEFAULT_BETA)
    yarn_amplitude(header)
    if config["rope_scaling"] is not None:
        config["rope_scaling"]["llama_4_scaling_beta"] = beta


ARCHITECTURES: Final = {
    "mistral4": Architecture(
        block_names={**NAMES, **EXPERTS, **_JOINED},
        keys={**KEYS, "attention.temperature_scale": "llama_4_scaling_beta"},
        checked=CHECKED,
        configure=_configure,
        restore=restore_latent,
    ),
}
