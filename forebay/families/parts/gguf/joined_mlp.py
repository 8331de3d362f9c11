"""Names of an MLP whose inputs are joined."""

from __future__ import annotations

from typing import Final

JOINED_MLP: Final = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
