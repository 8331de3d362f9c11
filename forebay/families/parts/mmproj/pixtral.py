"""The encoder of Mistral 3 (Pixtral) in GGUF."""

from __future__ import annotations

from typing import Final

from forebay.families.config.vision.pixtral import NORM_EPS
from forebay.families.parts.mmproj.projector import GELU, SILU, Described, Header, Projector
from forebay.families.parts.mmproj.siglip import SIZES

_TOWER: Final = "model.vision_tower"
_PROJECTOR: Final = "model.multi_modal_projector"


def _pixtral(header: Header) -> Described:
    header.own.only("attention.layer_norm_epsilon", NORM_EPS)
    gelu = header.activation(GELU, SILU) == GELU
    vision = {
        **header.fields({stored: ours for stored, ours in SIZES.items() if ours != "layer_norm_eps"}),
        "model_type": "pixtral",
        "intermediate_size": header.inner_size,
        "hidden_act": "gelu" if gelu else "silu",
        "rope_theta": header.file.metadata.get("clip.rope.freq_base", 10_000.0),
    }
    around = {
        "spatial_merge_size": header.own.size("spatial_merge_size", default=1),
        "image_token_id": header.token("[IMG]"),
        "multimodal_projector_bias": header.has("mm.1.bias"),
    }
    size = {"size": {"longest_edge": header.own.size("image_size")}}
    return Described(vision, around, {**header.pixels(), **size})


PROJECTORS: Final = {
    "pixtral": Projector(
        types=dict.fromkeys(("llama", "mistral", "ministral3", "mistral4"), "mistral3"),
        describe=_pixtral,
        names={
            "v.patch_embd": f"{_TOWER}.patch_conv",
            "v.pre_ln": f"{_TOWER}.ln_pre",
            "mm.input_norm": f"{_PROJECTOR}.norm",
            "mm.patch_merger": f"{_PROJECTOR}.patch_merger.merging_layer",
            "mm.1": f"{_PROJECTOR}.linear_1",
            "mm.2": f"{_PROJECTOR}.linear_2",
        },
        layers=f"{_TOWER}.transformer.layers",
        blocks={
            "ln1": "attention_norm",
            "ln2": "ffn_norm",
            "attn_q": "attention.q_proj",
            "attn_k": "attention.k_proj",
            "attn_v": "attention.v_proj",
            "attn_out": "attention.o_proj",
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
        },
        output="mm.2.weight",
        ignored=("v.token_embd.img_break",),  # the language model's own embedding of that token
        rotated=True,
    ),
}
