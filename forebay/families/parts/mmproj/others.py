"""Encoders of Gemma 4, and of Mistral 3 (Pixtral), in GGUF."""

from __future__ import annotations

from typing import Final

from forebay.families.config.vision.pixtral import NORM_EPS
from forebay.families.parts.gemma4 import Gemma4Config
from forebay.families.parts.mmproj.arrange import pixel_patches
from forebay.families.parts.mmproj.projector import GELU, SILU, Described, Header, Projector, Tensors
from forebay.families.parts.mmproj.siglip import SIZES

_TOWER: Final = "model.vision_tower"
_PROJECTOR: Final = "model.multi_modal_projector"
_GEMMA4_LAYERS: Final = f"{_TOWER}.encoder.layers"
_TABLE: Final = f"{_TOWER}.patch_embedder.position_embedding_table"
_LINEARS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_PADDING: Final = "tokenizer.ggml.padding_token_id"


def _gemma4(header: Header) -> Described:
    language = header.language.config
    (head_dim,) = header.shape("v.blk.0.attn_q_norm.weight", 1)
    vision = {
        **header.fields(
            {stored: ours for stored, ours in SIZES.items() if ours not in ("layer_norm_eps", "image_size")}
        ),
        "rms_norm_eps": header.own.number("attention.layer_norm_epsilon", default=1e-6),
        "intermediate_size": header.inner_size,
        "num_key_value_heads": header.rows("v.blk.0.attn_k.weight") // head_dim,
        "head_dim": head_dim,
        "pooling_kernel_size": header.own.size("projector.scale_factor", default=3),
        "position_embedding_size": header.shape("v.position_embd.weight", 3)[1],
        "use_clipped_linears": header.has("v.blk.0.attn_q.input_max"),
        "standardize": header.has("v.std_bias"),
    }
    both = isinstance(language, Gemma4Config) and language.bidirectional
    around = {
        "image_token_id": header.token("<|image|>"),
        "boi_token_id": header.token("<|image>"),
        "eoi_token_id": header.token("<image|>"),
        "text_config": {
            "pad_token_id": header.language.metadata.get(_PADDING, 0),
            "use_bidirectional_attention": "vision" if both else None,
        },
    }
    return Described(vision, around, {**header.pixels(), "do_normalize": True})


def _restore_gemma4(tensors: Tensors, header: Header) -> Tensors:
    """Give linear layers their names in transformers, within which bounds have none of their own."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        is_linear = kind == "weight" and name.startswith(_GEMMA4_LAYERS) and stem.endswith(_LINEARS)
        found[_TABLE if stem == _TABLE else f"{stem}.linear.weight" if is_linear else name] = tensor
    return pixel_patches(found, f"{_TOWER}.patch_embedder.input_proj.weight", header)


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
    "gemma4v": Projector(
        types={"gemma4_text": "gemma4"},
        describe=_gemma4,
        names={
            "v.patch_embd": f"{_TOWER}.patch_embedder.input_proj",
            "v.position_embd": _TABLE,
            "v.std_bias": f"{_TOWER}.std_bias",
            "v.std_scale": f"{_TOWER}.std_scale",
            "mm.input_projection": "model.embed_vision.embedding_projection",
        },
        layers=_GEMMA4_LAYERS,
        blocks={
            "ln1": "input_layernorm",
            "ln2": "pre_feedforward_layernorm",
            "attn_post_norm": "post_attention_layernorm",
            "ffn_post_norm": "post_feedforward_layernorm",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_out": "self_attn.o_proj",
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "ffn_gate": "mlp.gate_proj",
            "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj",
        },
        output="mm.input_projection.weight",
        restore=_restore_gemma4,
    ),
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
