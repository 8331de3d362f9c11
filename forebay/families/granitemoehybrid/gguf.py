"""Left out: Bamba, which shares this architecture (the files do not say how its half-rotated heads are stored)."""

from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import PROJECTIONS, Architecture, Header, Tensors, within
from forebay.families.config.transformer import FULL, LINEAR
from forebay.families.parts.gguf.joined_experts import _SHARED, EXPERTS, SCALES, join_shared
from forebay.families.parts.gguf.mamba import SSM_KEYS, limit_positions
from forebay.families.parts.gguf.mamba2 import BAMBA_KEYS, MAMBA2, configure_bamba, expansion, restore_mamba2


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
