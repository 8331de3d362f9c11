"""GGUF files for tests, written with the gguf package's own writer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFValueType

# Where a block of a type that the package cannot quantize to has its float16 scales.
_HALF_AT = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
K_TYPES = tuple(_HALF_AT)
_SMALL = {
    "IQ1_S": (0,),
    "IQ1_M": (),  # in four parts
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ3_XXS": (0,),
    "IQ3_S": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "NVFP4": (),
}
SMALL_TYPES = tuple(_SMALL)
_HALF_AT |= _SMALL
# In a larger form, as no kernel reads a smaller one: the bits of a weight.
LARGER = {
    "NVFP4": 5.0,
    "TQ1_0": 2.625,
    "TQ2_0": 2.625,
    "IQ1_S": 5.625,
    "IQ1_M": 6.5625,
    "IQ3_XXS": 6.5625,
    "IQ3_S": 5.625,
}
TYPES = ("F32", "F16", "BF16", "MXFP4", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", *_HALF_AT)


def quantized(type_name: str, shape: tuple[int, int], seed: int) -> npt.NDArray[np.uint8]:
    """Random rows of a type, as bytes: quantized where the package can, else random blocks with finite scales."""
    rng = np.random.default_rng(seed)
    kind = GGMLQuantizationType[type_name]
    if type_name not in _HALF_AT:
        values = rng.standard_normal(shape).astype(np.float32)
        return gguf.quants.quantize(values, kind).view(np.uint8)
    elements, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // elements, num_bytes), dtype=np.uint8)
    if type_name == "NVFP4":
        blocks[:, :4] &= 0x7F  # its scales are unsigned
    scales = rng.uniform(0.001, 0.01, (len(blocks), 2))
    if type_name not in K_TYPES:
        scales *= rng.choice([-1, 1], scales.shape)
    set_scales(blocks, type_name, scales.astype(np.float16))
    return blocks.reshape(shape[0], -1)


def set_scales(blocks: npt.NDArray[np.uint8], type_name: str, scales: npt.NDArray[np.float16]) -> None:
    """Set the float16 numbers of blocks [n, bytes] to `scales` [n, as many or more]."""
    for i, start in enumerate(_HALF_AT[type_name]):
        blocks[:, start : start + 2] = np.ascontiguousarray(scales[:, i : i + 1]).view(np.uint8)
    if type_name == "IQ1_M":
        words = blocks[:, 48:].copy().view(np.uint16) & 0x0FFF
        fourths = np.ascontiguousarray(scales[:, :1]).view(np.uint16) >> np.array([0, 4, 8, 12], np.uint16) & 15
        blocks[:, 48:] = (words | fourths << 12).astype(np.uint16).view(np.uint8)


TOKENIZER: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [*map(chr, range(ord("a"), ord("z") + 1)), "ab", *"01234"],
    "tokenizer.ggml.merges": ["a b"],
}
"""The tokenizer of that llama: entries of the metadata."""


def llama_metadata(**overrides: Any) -> dict[str, Any]:
    """A one-layer llama: hidden 256, 4 heads, 2 KV heads, vocabulary 32. Keys without a dot are `llama.`'s."""
    return {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": 256,
        "feed_forward_length": 256,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": 64,
        **overrides,
    }


def llama_tensors(type_name: str) -> dict[str, npt.NDArray[Any]]:
    """Its tensors, matrices in the type given, norms in F32."""
    matrices = {
        "token_embd": (32, 256),
        "blk.0.attn_q": (256, 256),
        "blk.0.attn_k": (128, 256),
        "blk.0.attn_v": (128, 256),
        "blk.0.attn_output": (256, 256),
        "blk.0.ffn_gate": (256, 256),
        "blk.0.ffn_up": (256, 256),
        "blk.0.ffn_down": (256, 256),
    }
    tensors: dict[str, npt.NDArray[Any]] = {
        f"{name}.weight": quantized(type_name, shape, seed) for seed, (name, shape) in enumerate(matrices.items())
    }
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        tensors[f"{name}.weight"] = np.ones(256, np.float32)
    return tensors


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, npt.NDArray[Any]],
    *,
    type_name: str = "F32",
    architecture: str = "llama",
    extra: Mapping[str, Any] | None = None,
    part_tensors: int = 0,
) -> Path:
    """Write a file; `metadata` under the prefix of the architecture, `extra` and the tokenizer as is. uint8 tensors are
    of `type_name`. With `part_tensors` write parts of so many tensors each, and return the first."""
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=part_tensors)
    named = {key if key.startswith("tokenizer.") else f"{architecture}.{key}": value for key, value in metadata.items()}
    entries = {**named, **(extra or {})}
    for key, value in entries.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, np.ndarray) and value.dtype == np.uint64:
            writer.add_key_value(key, value.tolist(), GGUFValueType.ARRAY, sub_type=GGUFValueType.UINT64)
        else:
            writer.add_array(key, value)
    for name, data in tensors.items():
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[type_name] if data.dtype == np.uint8 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if path.exists() else min(path.parent.glob(f"{path.stem}-*-of-*.gguf"))
