from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import PRE_NORM, Architecture, Header
from forebay.families.parts.gguf.experts import restore_correction
from forebay.families.parts.gguf.mixtures import EXPERTS
from forebay.families.parts.gguf.partial_rotary import configure as configure_rotation


def _configure(header: Header) -> None:
    configure_rotation(header)
    header.check_sigmoid(default=None)
    config = header.config
    config["intermediate_size"] = config.pop("moe_intermediate_size", config.get("intermediate_size"))


ARCHITECTURES: Final = {
    "minimax-m2": Architecture(
        block_names={**PRE_NORM, **EXPERTS, "exp_probs_b": "block_sparse_moe.e_score_correction"},
        checked=("rope.dimension_count", "expert_gating_func"),
        configure=_configure,
        restore=restore_correction,
    )
}
