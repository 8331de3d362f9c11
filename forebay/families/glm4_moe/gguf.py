"""Left out: the blocks that draft, behind the model's own. Files of Solar Open have this architecture, too."""

from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import ATTENTION, EXPERTS, MLP, Architecture, Header
from forebay.families.parts.gguf.experts import GROUPED_CHECKED, configure_grouped, restore_correction
from forebay.families.parts.gguf.latent import DRAFT, GROUPED, SHARED_EXPERTS, without_draft
from forebay.families.parts.gguf.partial_rotary import configure as configure_rotation

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
