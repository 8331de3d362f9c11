"""Names and keys of experts in groups."""

from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import Header, Tensors
from forebay.families.parts.gguf.latent import leave_out_draft

GROUPED_CHECKED: Final = ("expert_gating_func", "expert_weights_norm", "nextn_predict_layers")


def configure_grouped(header: Header) -> None:
    """Complete the configuration with the fields of experts in groups. Raises ModelError for another router."""
    header.check_sigmoid()
    header.config.update(
        n_routed_experts=header.config.pop("num_experts", None),
        norm_topk_prob=bool(header.own.get("expert_weights_norm", False)),
    )
    leave_out_draft(header)


def restore_correction(tensors: Tensors) -> Tensors:
    """Return the tensors with the correction of the experts' scores under its name, which has no suffix."""
    return {name.replace(".e_score_correction.bias", ".e_score_correction_bias"): t for name, t in tensors.items()}
