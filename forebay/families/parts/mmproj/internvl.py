"""The encoder of InternVL in GGUF."""

from __future__ import annotations

from typing import Final

from forebay.families.parts.mmproj.arrange import rows_of_one
from forebay.families.parts.mmproj.projector import GELU, Described, Header, Projector, Tensors
from forebay.families.parts.mmproj.siglip import SIZES

_TOWER: Final = "model.vision_tower"
_LAYERS: Final = f"{_TOWER}.encoder.layer"
_PROJECTOR: Final = "model.multi_modal_projector"
_CLASS: Final = f"{_TOWER}.embeddings.cls_token"
_POSITIONS: Final = f"{_TOWER}.embeddings.position_embeddings"
_SCALES: Final = (".lambda_1.weight", ".lambda_2.weight")
_TILES: Final = {"preproc_min_tiles": "min_patches", "preproc_max_tiles": "max_patches"}


def _internvl(header: Header) -> Described:
    header.activation(GELU)
    vision = {
        **header.fields(SIZES),
        "intermediate_size": header.inner_size,
        "attention_bias": header.has("v.blk.0.attn_q.bias"),
        "use_qk_norm": header.has("v.blk.0.attn_q_norm.weight"),
        "norm_type": "layer_norm" if header.has("v.blk.0.ln1.bias") else "rms_norm",
        "use_mean_pooling": not header.has("v.post_ln.weight"),
    }
    around = {
        "downsample_ratio": 1 / header.own.size("projector.scale_factor", default=2),
        "image_token_id": header.token("<IMG_CONTEXT>"),
    }
    return Described(vision, around, {**header.pixels(), **header.fields(_TILES)})


def _restore(tensors: Tensors, header: Header) -> Tensors:
    """Give what transformers has as parameters of their own their names and shapes."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        found[name.removesuffix(".weight") if name.endswith(_SCALES) else name] = tensor
    for name in (_CLASS, _POSITIONS):
        if name in found:
            found[name] = rows_of_one(found[name])
    return found


PROJECTORS: Final = {
    "internvl": Projector(
        types=dict.fromkeys(("qwen2", "qwen3", "qwen3_moe", "llama", "gpt_oss"), "internvl"),
        describe=_internvl,
        names={
            "v.class_embd": _CLASS,
            "v.patch_embd": f"{_TOWER}.embeddings.patch_embeddings.projection",
            "v.position_embd.weight": _POSITIONS,
            "v.post_ln": f"{_TOWER}.layernorm",
            "mm.model.mlp.0": f"{_PROJECTOR}.layer_norm",
            "mm.model.mlp.1": f"{_PROJECTOR}.linear_1",
            "mm.model.mlp.3": f"{_PROJECTOR}.linear_2",
        },
        layers=_LAYERS,
        blocks={
            "ln1": "layernorm_before",
            "ln2": "layernorm_after",
            "attn_q": "attention.q_proj",
            "attn_k": "attention.k_proj",
            "attn_v": "attention.v_proj",
            "attn_out": "attention.projection_layer",
            "attn_q_norm": "attention.q_norm",
            "attn_k_norm": "attention.k_norm",
            "ffn_up": "mlp.fc1",
            "ffn_down": "mlp.fc2",
            "ls1": "lambda_1",
            "ls2": "lambda_2",
        },
        output="mm.model.mlp.3.weight",
        restore=_restore,
    ),
}
