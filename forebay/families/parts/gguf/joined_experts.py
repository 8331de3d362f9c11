"""Names of experts whose inputs are joined."""

from __future__ import annotations

from typing import Final

from forebay.base.errors import ModelError
from forebay.families.base.architecture import GATED, Tensors, expert_names, within
from forebay.formats.stored_tensor import one_below_the_other

_SHARED: Final = {"ffn_gate": "gate", "ffn_up": "up", "ffn_down": "output_linear"}
SCALES: Final = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
EXPERTS: Final = {
    "ffn_gate_inp": "block_sparse_moe.router",
    **expert_names("block_sparse_moe", GATED),
    **within("shared_mlp", {f"{stored}_shexp": name for stored, name in _SHARED.items()}),
}


def join_shared(tensors: Tensors) -> Tensors:
    """Make one tensor of gate and up of each shared MLP. Raises ModelError where one of them is missing."""
    joined = dict(tensors)
    for name in [name for name in joined if name.endswith(".shared_mlp.gate.weight")]:
        gate, up = joined.pop(name), joined.pop(name.replace(".gate.", ".up."), None)
        if up is None or up.shape != gate.shape:
            raise ModelError(f"{name}: there is no up of the same shape")
        joined[name.replace(".gate.", ".input_linear.")] = one_below_the_other(gate, up)
    return joined
