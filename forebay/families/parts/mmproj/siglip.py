"""SigLIP encoders in GGUF: those of Gemma 3, of SmolVLM and Idefics 3, and of LFM2-VL."""

from __future__ import annotations

from typing import Final

from forebay.families.parts.mmproj.arrange import pixel_patches
from forebay.families.parts.mmproj.projector import GELU, Described, Header, Projector, Raw, Tensors
from forebay.formats.stored_tensor import less_one

BLOCKS: Final = {
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
SIZES: Final = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "image_size": "image_size",
    "patch_size": "patch_size",
}
_TOWER: Final = "model.vision_tower"
_PROJECTOR: Final = "model.multi_modal_projector"
_SMOL: Final = "model.vision_model"
_NORM: Final = f"{_PROJECTOR}.mm_soft_emb_norm.weight"
# Files leave out rows of the embedding that the tokenizer has no text for: the placeholder of images may be among them.
_SOFT_TOKENS: Final = ("<image_soft_token>", "<unused0>")


def _outside(tower: str) -> dict[str, str]:
    return {
        "v.patch_embd": f"{tower}.embeddings.patch_embedding",
        "v.position_embd": f"{tower}.embeddings.position_embedding",
        "v.post_ln": f"{tower}.post_layernorm",
    }


def _vision(header: Header) -> Raw:
    header.activation(GELU)
    return {**header.fields(SIZES), "intermediate_size": header.inner_size}


def _gemma3(header: Header) -> Described:
    edge, patch = header.own.size("image_size"), header.own.size("patch_size")
    side = edge // patch // header.own.size("projector.scale_factor", default=4)
    around = {
        "mm_tokens_per_image": side**2,
        "image_token_index": header.token(*_SOFT_TOKENS),
        "boi_token_index": header.token("<start_of_image>"),
        "eoi_token_index": header.token("<end_of_image>"),
    }
    return Described(_vision(header), around, header.pixels())


def _from_one(tensors: Tensors, header: Header) -> Tensors:
    """The converter adds 1 to the norm's weights."""
    return {name: less_one(tensor) if name == _NORM else tensor for name, tensor in tensors.items()}


def _idefics3(header: Header) -> Described:
    around = {
        "scale_factor": header.own.size("projector.scale_factor", default=2),
        "image_token_id": header.token("<image>"),
    }
    longest = header.own.get("preproc_image_size")
    size = {} if longest is None else {"size": {"longest_edge": longest}}
    return Described(_vision(header), around, {**header.pixels(), **size})


def _lfm2(header: Header) -> Described:
    vision = {
        **_vision(header),
        "model_type": "siglip2_vision_model",
        "num_patches": header.rows("v.position_embd.weight"),
    }
    vision.pop("image_size", None)  # written, and of no use: tiles have any size
    around = {
        "downsample_factor": header.own.size("projector.scale_factor", default=2),
        "image_token_id": header.token("<image>"),
        "projector_hidden_size": header.rows("mm.1.weight"),
        "projector_use_layernorm": header.has("mm.input_norm.weight"),
        "projector_bias": header.has("mm.1.bias"),
    }
    return Described(vision, around, header.pixels())


PROJECTORS: Final = {
    "gemma3": Projector(
        types={"gemma3_text": "gemma3"},
        describe=_gemma3,
        names={
            **_outside(_TOWER),
            "mm.input_projection.weight": f"{_PROJECTOR}.mm_input_projection_weight",
            "mm.soft_emb_norm": f"{_PROJECTOR}.mm_soft_emb_norm",
        },
        layers=f"{_TOWER}.encoder.layers",
        blocks=BLOCKS,
        output="mm.input_projection.weight",
        output_axis=1,
        restore=_from_one,
    ),
    "idefics3": Projector(
        types={"llama": "smolvlm"},
        describe=_idefics3,
        names={**_outside(_SMOL), "mm.model.fc": "model.connector.modality_projection.proj"},
        layers=f"{_SMOL}.encoder.layers",
        blocks=BLOCKS,
        output="mm.model.fc.weight",
    ),
    "lfm2": Projector(
        types={"lfm2": "lfm2_vl"},
        describe=_lfm2,
        names={
            **_outside(_TOWER),
            "mm.input_norm": f"{_PROJECTOR}.layer_norm",
            "mm.1": f"{_PROJECTOR}.linear_1",
            "mm.2": f"{_PROJECTOR}.linear_2",
        },
        layers=f"{_TOWER}.encoder.layers",
        blocks=BLOCKS,
        output="mm.2.weight",
        restore=lambda tensors, header: pixel_patches(tensors, f"{_TOWER}.embeddings.patch_embedding.weight", header),
    ),
}
