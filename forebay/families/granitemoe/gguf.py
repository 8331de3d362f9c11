from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import PRE_NORM, Architecture, Header
from forebay.families.parts.gguf.joined_experts import EXPERTS, SCALES, join_shared
from forebay.families.parts.gguf.mamba import SSM_KEYS
from forebay.families.parts.gguf.multipliers import attention_alone


def _configure(header: Header) -> None:
    attention_alone(header)
    header.config["num_local_experts"] = header.config.pop("num_experts", None)
    if "shared_intermediate_size" in header.config:
        header.config["model_type"] = "granitemoeshared"  # the format has one architecture for both


ARCHITECTURES: Final = {
    "granitemoe": Architecture(
        interleaved_rope=True,
        block_names={**PRE_NORM, **EXPERTS},
        keys={**SCALES, "expert_shared_feed_forward_length": "shared_intermediate_size"},
        checked=(*SSM_KEYS, "attention.head_count_kv"),
        configure=_configure,
        restore=join_shared,
    ),
}
