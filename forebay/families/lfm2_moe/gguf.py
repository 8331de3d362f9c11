from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import Architecture, Header, expert_names
from forebay.families.parts.gguf.convolution import NAMES, TOP, configure, restore

_MOE_NAMES: Final = {
    **NAMES,
    "ffn_gate_inp": "feed_forward.gate",
    **expert_names("feed_forward", {"ffn_gate": "w1", "ffn_up": "w3", "ffn_down": "w2"}),
    "exp_probs_b": "feed_forward.expert_bias",
}


def _configure(header: Header) -> None:
    configure(header)
    header.check_sigmoid(default=None)
    header.config.update(use_expert_bias=header.has("exp_probs_b.bias"), norm_topk_prob=True)


ARCHITECTURES: Final = {
    "lfm2moe": Architecture(
        block_names=_MOE_NAMES,
        top_names=TOP,
        keys={"shortconv.l_cache": "conv_L_cache", "leading_dense_block_count": "num_dense_layers"},
        checked=("attention.head_count_kv", "expert_gating_func"),
        configure=_configure,
        restore=restore,
    ),
}
