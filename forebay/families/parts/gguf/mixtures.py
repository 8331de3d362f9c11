"""Names of experts that Llama's architecture has."""

from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import expert_names

EXPERTS: Final = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    **expert_names("block_sparse_moe", {"ffn_gate": "w1", "ffn_up": "w3", "ffn_down": "w2"}),
}
