"""Left out: the blocks that draft, behind the model's own. Files of Solar Open have this architecture, too."""

from __future__ import annotations

from typing import Final

from forebay.families.architecture import ATTENTION, EXPERTS, MLP, Architecture, Header, Tensors
from forebay.families.deepseek_v3.gguf import DRAFT, GROUPED, SHARED_EXPERTS, leave_out_draft, without_draft
from forebay.families.glm4.gguf import configure as configure_rotation

GROUPED_CHECKED: Final = ("expert_gating_func", "expert_weights_norm", "nextn_predict_layers")

_NAMES: Final = {
    **ATTENTION,
    **MLP,
    **EXPERTS,
    **SHARED_EXPERTS,
    **DRAFT,
    "exp_probs_b": "mlp.gate.e_score_correction",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
}


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


def _configure(header: Header) -> None:
    configure_rotation(header)
    configure_grouped(header)
    header.config["use_qk_norm"] = header.has("attn_q_norm.weight")


ARCHITECTURES: Final = {
    "glm4moe": Architecture(
        block_names=_NAMES,
        keys=GROUPED,
        checked=("rope.dimension_count", *GROUPED_CHECKED),
        configure=_configure,
        reorder=without_draft,
        restore=restore_correction,
    )
}
