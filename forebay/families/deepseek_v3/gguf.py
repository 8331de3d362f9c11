"""The architecture is that of DeepSeek-V2, too, whose experts are scored by a softmax, and of GLM 4.7 Flash.

Left out: YaRN without the multiplier of its logarithm, whose amplitude the files do not say; the blocks that draft,
which are behind the model's own; old files, of V2, whose sizes are those of expanded keys and values.
"""

from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import EXPERTS, Architecture, Header
from forebay.families.parts.gguf.latent import (
    CHECKED,
    DRAFT,
    KEYS,
    NAMES,
    configure_latent,
    leave_out_draft,
    restore_latent,
    without_draft,
    yarn_amplitude,
)

_SOFTMAX: Final = 1  # llama.cpp's number of that gating function


def _configure(header: Header) -> None:
    configure_latent(header)
    leave_out_draft(header)
    own, config = header.own, header.config
    corrected = header.has("exp_probs_b.bias")
    if not corrected and own.get("expert_gating_func", _SOFTMAX) == _SOFTMAX:  # V2's files may omit it
        config["model_type"] = "deepseek_v2"
        config["topk_method"] = "greedy" if config["n_group"] == 1 else "group_limited_greedy"
    else:
        header.check_sigmoid()
    config["n_routed_experts"] = config.pop("num_experts", None)
    config["norm_topk_prob"] = bool(own.get("expert_weights_norm", False))
    yarn_amplitude(header)


ARCHITECTURES: Final = {
    "deepseek2": Architecture(
        block_names={**NAMES, **EXPERTS, **DRAFT},
        keys=KEYS,
        checked=(*CHECKED, "nextn_predict_layers"),
        configure=_configure,
        reorder=without_draft,
        restore=restore_latent,
    ),
}
