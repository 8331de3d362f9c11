from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import ATTENTION, EXPERTS, Architecture, Header, Tensors
from forebay.families.parts.gguf import exaone as exaone4
from forebay.families.parts.gguf.latent import DRAFT, DRAFTING, NAMES, leave_out_draft, without_draft


def _configure(header: Header) -> None:
    """The last blocks may draft tokens: they are not among the model's layers."""
    own, config = header.own, header.config
    header.check_sigmoid()
    leave_out_draft(header)
    exaone4.configure(header)
    config["norm_topk_prob"] = bool(own.get("expert_weights_norm", False))


def _restore(tensors: Tensors) -> Tensors:
    name = "gate.e_score_correction"
    return {stored.replace(f"{name}.bias", f"{name}_bias"): tensor for stored, tensor in tensors.items()}


ARCHITECTURES: Final = {
    "exaone-moe": Architecture(
        block_names={**NAMES, **ATTENTION, **EXPERTS, **DRAFT},
        keys={
            "attention.sliding_window": "sliding_window",
            "expert_shared_count": "num_shared_experts",
            "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
            "expert_weights_scale": "routed_scaling_factor",
            "leading_dense_block_count": "first_k_dense_replace",
        },
        checked=(
            "attention.sliding_window_pattern",
            "expert_gating_func",
            "expert_shared_feed_forward_length",
            "expert_weights_norm",
            DRAFTING,
        ),
        configure=_configure,
        reorder=without_draft,
        restore=_restore,
    )
}
