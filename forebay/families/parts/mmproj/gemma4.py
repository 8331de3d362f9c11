"""Encoders of Gemma 4 in GGUF, and the part for images of Gemma 4 12B, which has no encoder."""

from __future__ import annotations

from math import isqrt
from typing import Final

from forebay.base.pixels import CHANNELS
from forebay.families.parts.gemma4 import Gemma4Config
from forebay.families.parts.mmproj.arrange import by_pixel, number, pixel_patches, swapped
from forebay.families.parts.mmproj.projector import Described, Header, Projector, Raw, Tensors
from forebay.families.parts.mmproj.siglip import SIZES

_TOWER: Final = "model.vision_tower"
_LAYERS: Final = f"{_TOWER}.encoder.layers"
_TABLE: Final = f"{_TOWER}.patch_embedder.position_embedding_table"
_LINEARS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_BOUNDS: Final = ("input_min", "input_max", "output_min", "output_max")
_PADDING: Final = "tokenizer.ggml.padding_token_id"
# Of the model without an encoder.
_PATCHES: Final = "model.embed_vision"
_POSITIONS: Final = f"{_PATCHES}.pos_embedding"


def _gemma4(header: Header) -> Described:
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
    return Described(vision, _around(header), {**header.pixels(), "do_normalize": True})


def _around(header: Header) -> Raw:
    language = header.language.config
    both = isinstance(language, Gemma4Config) and language.bidirectional
    return {
        "image_token_id": header.token("<|image|>"),
        "boi_token_id": header.token("<|image>"),
        "eoi_token_id": header.token("<image|>"),
        "text_config": {
            "pad_token_id": header.language.metadata.get(_PADDING, 0),
            "use_bidirectional_attention": "vision" if both else None,
        },
    }


def _restore(tensors: Tensors, header: Header) -> Tensors:
    """Give linear layers their names in transformers, within which bounds have none of their own, and bounds no
    dimensions."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        is_linear = kind == "weight" and name.startswith(_LAYERS) and stem.endswith(_LINEARS)
        tensor = number(tensor, header) if kind in _BOUNDS else tensor
        found[_TABLE if stem == _TABLE else f"{stem}.linear.weight" if is_linear else name] = tensor
    return pixel_patches(found, f"{_TOWER}.patch_embedder.input_proj.weight", header)


def _gemma4_unified(header: Header) -> Described:
    """Describe a part for images without an encoder: a patch has all pixels of a token. Files have its sizes as 0."""
    for name in ("block_count", "attention.head_count"):
        header.own.only(name, 0)
    width, _ = header.shape("v.patch_embd.weight", 2)
    header.own.only("embedding_length", width)
    patch = header.own.size("patch_size", default=16)
    vision = {
        "patch_size": patch,
        "pooling_kernel_size": max(1, _token_edge(header) // patch),
        "model_patch_size": _token_edge(header),
        "mm_embed_dim": width,
        "mm_posemb_size": header.shape("v.position_embd.weight", 3)[1],
        "rms_norm_eps": header.own.number("attention.layer_norm_epsilon", default=1e-6),
    }
    header.own.only("projector.scale_factor", vision["pooling_kernel_size"])
    return Described(vision, _around(header), {**header.pixels(), "do_normalize": True})


def _token_edge(header: Header) -> int:
    """Return the pixels on an edge of what becomes one token. Raises ModelError if its pixels make no square."""
    (numbers,) = header.shape("v.patch_norm.1.weight", 1)
    edge = isqrt(numbers // CHANNELS)
    if numbers != CHANNELS * edge**2:
        raise header.wrong(
            f"v.patch_norm.1 has {numbers} numbers, which are no square of pixels in {CHANNELS} channels"
        )
    return edge


def _restore_unified(tensors: Tensors, header: Header) -> Tensors:
    """Return the tensors with weights by pixel, and with the two positions of a number side by side: files have
    channels before rows and columns, and all positions of columns before those of rows."""
    edge = _token_edge(header)
    found = {**tensors, _POSITIONS: swapped(tensors[_POSITIONS])}
    for name in (f"{_PATCHES}.{part}" for part in ("patch_dense.weight", "patch_ln1.weight", "patch_ln1.bias")):
        if name in found:
            found[name] = by_pixel(found[name], edge, header)
    return found


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
        layers=_LAYERS,
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
        restore=_restore,
    ),
    "gemma4uv": Projector(
        types={"gemma4_text": "gemma4_unified"},
        describe=_gemma4_unified,
        names={
            "v.patch_embd": f"{_PATCHES}.patch_dense",
            "v.patch_norm.1": f"{_PATCHES}.patch_ln1",
            "v.patch_norm.2": f"{_PATCHES}.patch_ln2",
            "v.patch_norm.3": f"{_PATCHES}.pos_norm",
            "v.position_embd.weight": _POSITIONS,
            "mm.input_projection": f"{_PATCHES}.multimodal_embedder.embedding_projection",
        },
        layers="",
        blocks={},
        output="mm.input_projection.weight",
        restore=_restore_unified,
    ),
}
