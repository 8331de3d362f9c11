"""Names of Phi-3.5-MoE in GGUF. Experts are chosen as the model was trained to, by a SparseMixer; llama.cpp takes a
softmax of the best two instead."""

from __future__ import annotations

from typing import Final

from forebay.families.base.architecture import ATTENTION, Architecture, Header
from forebay.families.base.gguf_names import LONG_ROPE_AMPLITUDE
from forebay.families.base.rope import MSCALES
from forebay.families.parts.gguf.mixtures import EXPERTS

_AMPLITUDE: Final = 1.243163121016122  # of both lists of published files; GGUF files have another formula's


def _configure(header: Header) -> None:
    config = header.config
    size = header.whole("embedding_length") // header.whole("attention.head_count")
    if header.whole("rope.dimension_count") != size:
        raise header.wrong(f"{header.own['rope.dimension_count']} rotated dimensions of {size} of a head")
    config.update(
        head_dim=size,
        num_local_experts=config.pop("num_experts", None),
        sliding_window=config.get("sliding_window") or None,  # 0 for none
        lm_head_bias="output.bias" in header.file.tensors,
    )
    if config["rope_scaling"] is not None:
        config["rope_scaling"].pop("attention_factor", None)
        config["rope_scaling"] |= dict.fromkeys(MSCALES, _AMPLITUDE)


ARCHITECTURES: Final = {
    "phimoe": Architecture(
        block_names={
            **ATTENTION,
            **EXPERTS,
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
        },
        keys={"attention.sliding_window": "sliding_window"},
        checked=("rope.dimension_count", LONG_ROPE_AMPLITUDE),
        configure=_configure,
    ),
}
