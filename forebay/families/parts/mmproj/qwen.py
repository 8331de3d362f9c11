"""Encoders of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5 in GGUF."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from forebay.families.base.fields import MAX_LAYERS
from forebay.families.parts.mmproj.arrange import in_time, one_below_another
from forebay.families.parts.mmproj.projector import GELU, QUICK_GELU, SILU, Described, Header, Projector, Raw, Tensors

_VISUAL: Final = "model.visual"
_PATCHES: Final = f"{_VISUAL}.patch_embed.proj.weight"
_SECOND: Final = f"{_PATCHES}.1"  # of the second picture in time
_SIZES: Final = {"block_count": "depth", "attention.head_count": "num_heads", "patch_size": "patch_size"}
_FUSED: Final = ("q", "k", "v")
_WINDOW: Final = 112  # pixels; files name none
# Pixels of an image that published processors have: files name none.
_PIXELS: Final = (56 * 56, 12_845_056)
_PIXELS_3: Final = (1 << 16, 1 << 24)

_BLOCKS: Final = {"ln1": "norm1", "ln2": "norm2", "attn_out": "attn.proj"}
_NAMES: Final = {"v.patch_embd": f"{_VISUAL}.patch_embed.proj", "v.patch_embd.weight.1": _SECOND}


def _vision(header: Header) -> Raw:
    header.own.get("attention.layer_norm_epsilon")  # the language model's; the encoder's is 1e-6 in all published ones
    merge = header.own.size("spatial_merge_size", default=2)
    return {**header.fields(_SIZES), "spatial_merge_size": merge, "temporal_patch_size": 2}


def _around(header: Header) -> Raw:
    return {"image_token_id": header.token("<|image_pad|>")}


def _processor(header: Header, pixels: tuple[int, int]) -> Raw:
    least, most = (
        header.own.get(f"image_{end}_pixels", value) for end, value in zip(("min", "max"), pixels, strict=True)
    )
    return {**header.pixels(), "min_pixels": least, "max_pixels": most}


def _qwen2(header: Header) -> Described:
    header.activation(QUICK_GELU)
    width, inner = header.own.size("embedding_length"), header.inner_size
    if inner % width:
        raise header.wrong(f"its MLPs have {inner} inner dimensions, no multiple of the {width} of a patch")
    sizes = {"embed_dim": width, "mlp_ratio": inner // width, "hidden_size": header.rows("mm.2.weight")}
    return Described({**_vision(header), **sizes}, _around(header), _processor(header, _PIXELS))


def _qwen2_5(header: Header) -> Described:
    header.activation(SILU)
    depth = header.own.size("block_count", most=MAX_LAYERS)
    period = header.own.size("n_wa_pattern", most=MAX_LAYERS)
    sizes = {
        "hidden_size": header.own.size("embedding_length"),
        "intermediate_size": header.inner_size,
        "out_hidden_size": header.rows("mm.2.weight"),
        "window_size": header.own.get("window_size", _WINDOW),
        "fullatt_block_indexes": [layer for layer in range(depth) if (layer + 1) % period == 0],
    }
    return Described({**_vision(header), **sizes}, _around(header), _processor(header, _PIXELS))


def _qwen3(header: Header) -> Described:
    header.activation(GELU)
    sizes: Raw = {
        "hidden_size": header.own.size("embedding_length"),
        "intermediate_size": header.inner_size,
        "out_hidden_size": header.rows("mm.2.weight"),
        "num_position_embeddings": header.rows("v.position_embd.weight"),
    }
    if "3_5" not in header.language.config.model_type:
        sizes["deepstack_visual_indexes"] = _deepstack(header)
    return Described({**_vision(header), **sizes}, _around(header), _processor(header, _PIXELS_3))


def _deepstack(header: Header) -> list[int]:
    """Return the layers behind which a feature is kept."""
    flags = header.own.get("is_deepstack_layers", ())
    if not isinstance(flags, list | tuple) or len(flags) > MAX_LAYERS or not set(flags) <= {False, True}:
        raise header.own.wrong("is_deepstack_layers", f"a list of at most {MAX_LAYERS} flags")
    return [int(layer) for layer in np.flatnonzero(flags)]


def _fused(tensors: Tensors, header: Header) -> Tensors:
    """Join q, k and v of each layer, which the converter cuts."""
    found = dict(tensors)
    for stem, kind in sorted(_cut(tensors)):
        parts = [found.pop(f"{stem}.{part}.{kind}", None) for part in _FUSED]
        there = [part for part in parts if part is not None]
        if len(there) < len(_FUSED):
            raise header.wrong(f"{stem}: of q, k and v only {len(there)} have a {kind}")
        found[f"{stem}.qkv.{kind}"] = one_below_another(there, header)
    return _in_time(found, header)


def _cut(names: Iterable[str]) -> set[tuple[str, str]]:
    split = (name.rsplit(".", 2) for name in names)
    return {(stem, kind) for stem, part, kind in split if stem.endswith(".attn") and part in _FUSED}


def _in_time(tensors: Tensors, header: Header) -> Tensors:
    """Join the weights of patches of two pictures in time."""
    found = dict(tensors)
    parts = [found.pop(name, None) for name in (_PATCHES, _SECOND)]
    if None in parts:
        raise header.wrong("v.patch_embd.weight and v.patch_embd.weight.1 must both be there: a patch is of two images")
    found[_PATCHES] = in_time([part for part in parts if part is not None], header)
    return found


def _feature_names(tensors: Tensors, header: Header) -> Tensors:
    """Number the mergers of features one by one: files have the numbers of their layers."""
    begin = f"{_VISUAL}.deepstack_merger_list."
    layers = sorted({int(name.removeprefix(begin).split(".")[0]) for name in tensors if name.startswith(begin)})
    numbers = {f"{begin}{layer}.": f"{begin}{number}." for number, layer in enumerate(layers)}

    def renamed(name: str) -> str:
        old = next((old for old in numbers if name.startswith(old)), "")
        return numbers[old] + name.removeprefix(old) if old else name

    return _in_time({renamed(name): tensor for name, tensor in tensors.items()}, header)


_CUT_ATTENTION: Final = {f"attn_{part}": f"attn.{part}" for part in _FUSED}
_MERGER_2: Final = {
    "v.post_ln": f"{_VISUAL}.merger.ln_q",
    "mm.0": f"{_VISUAL}.merger.mlp.0",
    "mm.2": f"{_VISUAL}.merger.mlp.2",
}
PROJECTORS: Final = {
    "qwen2vl_merger": Projector(
        types={"qwen2": "qwen2_vl"},
        describe=_qwen2,
        names={**_NAMES, **_MERGER_2},
        layers=f"{_VISUAL}.blocks",
        blocks={**_BLOCKS, **_CUT_ATTENTION, "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
        output="mm.2.weight",
        restore=_fused,
    ),
    "qwen2.5vl_merger": Projector(
        types={"qwen2": "qwen2_5_vl"},
        describe=_qwen2_5,
        names={**_NAMES, **_MERGER_2},
        layers=f"{_VISUAL}.blocks",
        blocks={
            **_BLOCKS,
            **_CUT_ATTENTION,
            **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
        },
        output="mm.2.weight",
        restore=_fused,
    ),
    "qwen3vl_merger": Projector(
        types={
            "qwen3": "qwen3_vl",
            "qwen3_moe": "qwen3_vl_moe",
            "qwen3_5_text": "qwen3_5",
            "qwen3_5_moe_text": "qwen3_5_moe",
        },
        describe=_qwen3,
        names={
            **_NAMES,
            "v.position_embd": f"{_VISUAL}.pos_embed",
            "v.post_ln": f"{_VISUAL}.merger.norm",
            "mm.0": f"{_VISUAL}.merger.linear_fc1",
            "mm.2": f"{_VISUAL}.merger.linear_fc2",
        },
        layers=f"{_VISUAL}.blocks",
        blocks={**_BLOCKS, "attn_qkv": "attn.qkv", "ffn_up": "mlp.linear_fc1", "ffn_down": "mlp.linear_fc2"},
        features=f"{_VISUAL}.deepstack_merger_list",
        output="mm.2.weight",
        restore=_feature_names,
    ),
}
