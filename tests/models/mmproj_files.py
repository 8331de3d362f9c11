"""Files of vision encoders as llama.cpp's converter makes them of transformers' models, for tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import gguf
import numpy as np
import numpy.typing as npt

from forebay.families.checkpoint import Checkpoint
from forebay.formats.stored_tensor import read_tensor
from tests.formats.gguf_files import write_gguf
from tests.models.test_gguf_window import common_metadata
from tests.models.tiny import VOCAB

Array = npt.NDArray[Any]

PROJECTORS: Final = {
    "smolvlm": "idefics3",
    "idefics3": "idefics3",
    "lfm2_vl": "lfm2",
    "mistral3": "pixtral",
    "gemma3": "gemma3",
    "gemma4": "gemma4v",
    "gemma4_unified": "gemma4uv",
    "internvl": "internvl",
    "qwen2_vl": "qwen2vl_merger",
    "qwen2_5_vl": "qwen2.5vl_merger",
    "qwen3_vl": "qwen3vl_merger",
    "qwen3_vl_moe": "qwen3vl_merger",
    "qwen3_5": "qwen3vl_merger",
    "qwen3_5_moe": "qwen3vl_merger",
}
_GEMMA4: Final = {7: "<|image|>", 6: "<|image>", 5: "<image|>"}
TOKENS: Final = {  # by the ids of the cases in `outers`
    "smolvlm": {5: "<image>"},
    "idefics3": {7: "<image>"},
    "lfm2_vl": {6: "<image>"},
    "mistral3": {7: "[IMG]"},
    "gemma3": {5: "<image_soft_token>", 6: "<start_of_image>", 7: "<end_of_image>"},
    "gemma4": _GEMMA4,
    "gemma4_unified": _GEMMA4,
    "internvl": {5: "<IMG_CONTEXT>"},
}
_QWEN_TOKENS: Final = {5: "<|image_pad|>"}
_ACTIVATIONS: Final = {"qwen2_vl": {}, "qwen2_5_vl": {"clip.use_silu": True}, "gemma4": {}, "gemma4_unified": {}}
_CLIP: Final = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
_AS_THEY_ARE: Final = ([0.0] * 3, [1.0] * 3)
_MEANS: Final = {
    "mistral3": _CLIP,
    "gemma4": _AS_THEY_ARE,
    "gemma4_unified": _AS_THEY_ARE,
    "internvl": _CLIP,
}
_GELU: Final = {"clip.use_gelu": True}
# What hub files and the converter call modules: the package's map of names has these.
_RENAMED: Final = {
    "gemma3": (("model.vision_tower.", "vision_tower.vision_model."), ("model.multi_modal", "multi_modal")),
    "lfm2_vl": (("model.vision_tower.", "vision_tower.vision_model."), ("model.multi_modal", "multi_modal")),
    "mistral3": (("model.vision_tower.", "vision_tower."), ("model.multi_modal", "multi_modal")),
    "gemma4": (
        ("model.vision_tower.encoder.", "vision_model.model."),
        (".linear.weight", ".weight"),
        ("position_embedding_table", "position_embedding_table.weight"),
        ("model.embed_vision.embedding_projection", "multi_modal_projector.mm_input_projection"),
    ),
}
_LAST_NORM: Final = "model.vision_tower.layernorm"  # which the package does not name
_SUFFIXES: Final = (".weight", ".bias", ".input_max", ".input_min", ".output_max", ".output_min")
_OF_ENCODER: Final = ("vision_tower", "vision_model", "connector", "multi_modal", "embed_vision", "visual")


def vocabulary(outer: str, *, padding: int = 0, sections: Sequence[int] = (1, 3, 2, 0)) -> dict[str, Any]:
    """Return the metadata of a language model's file that name tokens, those of images at the ids of the cases."""
    tokens = [f"t{at}" for at in range(VOCAB)]
    for at, text in TOKENS.get(outer, _QWEN_TOKENS).items():
        tokens[at] = text
    return {
        "general.architecture": "any",
        "any.rope.dimension_sections": np.array(sections, np.int32),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.padding_token_id": padding,
    }


def write_language_model(path: Path, checkpoint: Checkpoint) -> Path:
    """Write a llama that is beside an encoder, with a vocabulary without merges."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, checkpoint.config.num_layers)
    tensors = {_named(name, names): read_tensor(tensor) for name, tensor in checkpoint.tensors.items()}
    assert checkpoint.config.vision is not None, "it has no encoder"
    tokens = vocabulary(checkpoint.config.vision.kind)["tokenizer.ggml.tokens"]
    return write_gguf(path, common_metadata(checkpoint.config), tensors, extra={"tokenizer.ggml.tokens": tokens})


def write_mmproj(
    path: Path,
    oracle: Any,
    *,
    swapped: bool = False,
    without: str = "",
    shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    **changes: Any,
) -> Path:
    """Write the encoder of a transformers model, `without` the tensor of this name, and with zeros of other `shapes`.
    `swapped`: with the names of MLPs that old files have. `changes` of the metadata have `__` for a dot; None leaves
    one out."""
    config = oracle.config
    tensors = dict(_tensors(oracle))
    tensors.pop(without, None)
    tensors.update({name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
    if swapped:
        other = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
        tensors = {".".join(other.get(part, part) for part in name.split(".")): own for name, own in tensors.items()}
    metadata = {**_metadata(config), **{name.replace("__", "."): value for name, value in changes.items()}}
    there = {name: value for name, value in metadata.items() if value is not None}
    return write_gguf(path, {}, tensors, architecture=there.pop("general.architecture"), extra=there)


def _metadata(config: Any) -> dict[str, Any]:
    outer = config.model_type
    own = {
        **_sizes(config.vision_config),
        "projection_dim": config.text_config.hidden_size,
        "attention.layer_norm_epsilon": 1e-5 if outer == "mistral3" else 1e-6,
        "image_mean": _means(outer)[0],
        "image_std": _means(outer)[1],
        **_of_type(config),
    }
    return {
        "general.architecture": "clip",
        "clip.has_vision_encoder": True,
        "clip.projector_type": PROJECTORS[outer],
        **_ACTIVATIONS.get(outer, _GELU),
        **{f"clip.vision.{name}": value for name, value in own.items()},
    }


def _sizes(vision: Any) -> dict[str, int]:
    if not hasattr(vision, "hidden_size"):  # gemma4_unified, for which the converter makes them up
        zeros = dict.fromkeys(("feed_forward_length", "block_count", "attention.head_count"), 0)
        return {"image_size": 224, "patch_size": vision.patch_size, "embedding_length": vision.mm_embed_dim, **zeros}
    return {
        "image_size": _edge(getattr(vision, "image_size", 224)),
        "patch_size": _edge(vision.patch_size),
        "embedding_length": getattr(vision, "embed_dim", vision.hidden_size),
        "feed_forward_length": getattr(vision, "intermediate_size", vision.hidden_size),
        "block_count": _depth(vision),
        "attention.head_count": getattr(vision, "num_heads", None) or vision.num_attention_heads,
    }


def _edge(size: Any) -> int:
    return int(size[0] if isinstance(size, list | tuple) else size)


def _depth(vision: Any) -> int:
    depth: int = getattr(vision, "depth", 0) or getattr(vision, "num_hidden_layers", 0)
    return depth


def _means(outer: str) -> tuple[list[float], list[float]]:
    return _MEANS.get(outer, _CLIP if outer.startswith("qwen") else ([0.5] * 3, [0.5] * 3))


def _of_type(config: Any) -> dict[str, Any]:
    vision, outer = config.vision_config, config.model_type
    if outer in ("smolvlm", "idefics3"):
        return {"projector.scale_factor": config.scale_factor}
    if outer == "gemma3":
        side = vision.image_size // vision.patch_size
        return {"projector.scale_factor": side // int(config.mm_tokens_per_image**0.5)}
    if outer == "internvl":
        return {"projector.scale_factor": int(1 / config.downsample_ratio), "preproc_max_tiles": 6}
    if outer == "gemma4_unified":
        return {}
    if outer == "gemma4":
        return {"projector.scale_factor": vision.pooling_kernel_size}
    if outer == "lfm2_vl":
        return {"projector.scale_factor": config.downsample_factor, "image_size": 256}
    if outer == "mistral3":
        return {"spatial_merge_size": config.spatial_merge_size}
    more = {"spatial_merge_size": vision.spatial_merge_size, "image_min_pixels": 3136, "image_max_pixels": 1003520}
    if outer == "qwen2_5_vl":
        return {**more, "n_wa_pattern": vision.fullatt_block_indexes[0] + 1, "window_size": vision.window_size}
    if layers := getattr(vision, "deepstack_visual_indexes", []):
        return {**more, "is_deepstack_layers": [layer in layers for layer in range(vision.depth)]}
    return more


def _tensors(oracle: Any) -> Iterator[tuple[str, Array]]:
    config = oracle.config
    # The numbers of the projector's modules count as well.
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, max(_depth(config.vision_config), 4))
    for name, values in oracle.state_dict().items():
        if name.startswith(tuple(f"model.{part}" for part in _OF_ENCODER)) and ".head." not in name:
            yield from _converted(name, values.float().numpy(), config, names)


def _converted(name: str, values: Array, config: Any, names: gguf.TensorNameMap) -> Iterator[tuple[str, Array]]:
    """Do what the converter does to one tensor."""
    outer, vision = config.model_type, config.vision_config
    for old, new in _RENAMED.get(outer, ()):
        name = name.replace(old, new)
    if outer.startswith("qwen"):
        yield from _of_qwen(name.removeprefix("model."), values, config, names)
        return
    if outer == "gemma4_unified":
        yield _of_gemma4_unified(name.removeprefix("model.embed_vision."), values, vision.model_patch_size)
        return
    if outer == "internvl":
        yield _of_internvl(name, names), values
        return
    if outer in ("gemma4", "lfm2_vl") and ("input_proj.weight" in name or "patch_embedding.weight" in name):
        edge = vision.patch_size
        values = values.reshape(-1, edge, edge, 3).transpose(0, 3, 1, 2)
    if outer == "mistral3" and (".q_proj." in name or ".k_proj." in name):
        values = interleaved(values, vision.num_attention_heads)
    if "soft_emb_norm" in name:
        values = values + 1
    yield _named(name.replace("_projection_weight", "_projection.weight"), names), np.atleast_1d(values)


def _of_qwen(name: str, values: Array, config: Any, names: gguf.TensorNameMap) -> Iterator[tuple[str, Array]]:
    if name == "visual.patch_embed.proj.weight":
        yield "v.patch_embd.weight", values[:, :, 0]
        yield "v.patch_embd.weight.1", values[:, :, 1]
    elif ".qkv." in name and config.model_type.startswith("qwen2"):
        for part, own in zip("qkv", np.split(values, 3), strict=True):
            yield _named(name.replace("qkv", part), names), own
    elif name.startswith("visual.deepstack_merger_list."):
        number, part, kind = name.split(".")[2:]
        layer = config.vision_config.deepstack_visual_indexes[int(number)]
        yield f"v.deepstack.{layer}.{part.replace('linear_', '')}.{kind}", values
    elif name.startswith("visual.merger.") and not config.model_type.startswith("qwen2"):
        published = {"linear_fc1": "mm.0", "linear_fc2": "mm.2", "norm": "v.post_ln"}
        part, kind = name.split(".")[2:]
        yield f"{published[part]}.{kind}", values
    else:
        yield _named(name, names), values


def _of_gemma4_unified(name: str, values: Array, edge: int) -> tuple[str, Array]:
    """As llama.cpp's conversion/gemma.py: the gguf package has no names of this type yet."""
    module, _, kind = name.partition(".")
    if module == "pos_embedding":
        return "v.position_embd.weight", np.ascontiguousarray(values.swapaxes(0, 1))
    if module in ("patch_dense", "patch_ln1") and values.shape[-1] == 3 * edge**2:
        pixels = values.reshape(-1, edge, edge, 3).transpose(0, 3, 1, 2)
        values = np.ascontiguousarray(pixels).reshape(values.shape)
    own = {
        "patch_dense": "v.patch_embd",
        "patch_ln1": "v.patch_norm.1",
        "patch_ln2": "v.patch_norm.2",
        "pos_norm": "v.patch_norm.3",
        "multimodal_embedder": "mm.input_projection",
    }
    return f"{own[module]}.{kind.removeprefix('embedding_projection.')}", values


def _of_internvl(name: str, names: gguf.TensorNameMap) -> str:
    """As llama.cpp's conversion/intern_vision.py, which names parameters without a suffix `.weight`."""
    for old, new in (("layer_norm", "0"), ("linear_1", "1"), ("linear_2", "3")):
        name = name.replace(f"model.multi_modal_projector.{old}", f"mlp1.{new}")
    if ".lambda_" in name or name.endswith("position_embeddings"):
        name += ".weight"
    return "v.post_ln" + name.removeprefix(_LAST_NORM) if name.startswith(_LAST_NORM) else _named(name, names)


def _named(name: str, names: gguf.TensorNameMap) -> str:
    found = names.get_name(name, try_suffixes=_SUFFIXES)
    assert found is not None, name
    return found


def interleaved(values: Array, heads: int) -> Array:
    """Return the rows of q or k as the converter arranges them: rotary pairs (0, D/2), (1, D/2 + 1).. as neighbours."""
    return values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
