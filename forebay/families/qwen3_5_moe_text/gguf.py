from __future__ import annotations

from typing import Final

from forebay.families.architecture import EXPERTS, Architecture
from forebay.families.qwen3_5_text.gguf import CHECKED, KEYS, NAMES, configure, reorder, restore

SHARED_EXPERT: Final = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
EXPERT_NAMES: Final = {**NAMES, **EXPERTS, **SHARED_EXPERT}

ARCHITECTURES: Final = {
    "qwen35moe": Architecture(
        block_names=EXPERT_NAMES,
        keys=KEYS,
        checked=CHECKED,
        configure=configure,
        reorder=reorder,
        restore=restore,
    ),
}
