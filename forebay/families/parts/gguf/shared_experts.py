"""Names of experts and of the MLP beside them."""

from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import EXPERTS
from forebay.families.parts.gguf.gated_delta import NAMES

SHARED_EXPERT: Final = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
EXPERT_NAMES: Final = {**NAMES, **EXPERTS, **SHARED_EXPERT}
