"""Left out: Bamba, which shares this architecture (the files do not say how its half-rotated heads are stored)."""

from __future__ import annotations

from typing import Final

from forebay.base.errors import ModelError
from forebay.families.architecture import GATED, PROJECTIONS, Architecture, Header, Tensors, expert_names, within
from forebay.families.mamba.gguf import SSM_KEYS, limit_positions
from forebay.families.mamba2.gguf import BAMBA_KEYS, MAMBA2, configure_bamba, expansion, restore_mamba2
from forebay.families.transformer import FULL, LINEAR
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


def _configure(header: Header) -> None:
    if header.own.get("rope.scaling.finetuned"):
        raise header.wrong("a granitehybrid file with rotary embedding is Bamba's, and not supported")
    inner = configure_bamba(header)
    header.config.update(
        layer_types=header.kinds({"attn_q": FULL}, LINEAR),
        num_key_value_heads=header.kv_heads(),
        num_local_experts=header.own.get("expert_count", 0),
        attention_bias=header.has("attn_q.bias"),
        mamba_expand=expansion(header, inner),
    )
    limit_positions(header.config)


def _restore(tensors: Tensors) -> Tensors:
    return join_shared(restore_mamba2(tensors))


def join_shared(tensors: Tensors) -> Tensors:
    """Make one tensor of gate and up of each shared MLP. Raises ModelError where one of them is missing."""
    joined = dict(tensors)
    for name in [name for name in joined if name.endswith(".shared_mlp.gate.weight")]:
        gate, up = joined.pop(name), joined.pop(name.replace(".gate.", ".up."), None)
        if up is None or up.shape != gate.shape:
            raise ModelError(f"{name}: there is no up of the same shape")
        joined[name.replace(".gate.", ".input_linear.")] = one_below_the_other(gate, up)
    return joined


ARCHITECTURES: Final = {
    "granitehybrid": Architecture(
        interleaved_rope=True,
        block_names={
            **within("self_attn", PROJECTIONS),
            **within("mamba", MAMBA2),
            **within("shared_mlp", _SHARED),
            **EXPERTS,
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
        },
        keys={
            **BAMBA_KEYS,
            **SCALES,
            "expert_shared_feed_forward_length": "shared_intermediate_size",
        },
        checked=(*SSM_KEYS, "attention.head_count_kv"),
        configure=_configure,
        restore=_restore,
    ),
}
