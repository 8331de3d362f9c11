"""Translation of a GGUF file's names to transformers': its architecture, metadata (as a config.json) and tensors."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from forebay.base.errors import ModelError, brief
from forebay.families import TEXT_ENCODERS, TYPES
from forebay.families.base.architecture import Architecture, Header
from forebay.formats.gguf import GgufFile

_BLOCK_TENSOR: Final = re.compile(r"blk\.(\d{1,6})\.([a-z0-9_]+(?:\.[a-z_]+)??)(\.weight|\.bias|)")
ROPE_FACTORS: Final = "rope_freqs.weight"
LONG_ROPE: Final = {"short_factor": "rope_factors_short.weight", "long_factor": "rope_factors_long.weight"}
LONG_ROPE_AMPLITUDE: Final = "rope.scaling.attn_factor"
_MAX_ROPE_FACTORS: Final = 4096

# Metadata under `<architecture>.`, with config.json's names for what they say. Whatever is in neither table could
# change what the model computes, and is refused.
_CONFIG_KEYS: Final = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
# Of some architectures these have an entry for each layer, or for each axis of a picture.
_LISTS: Final = (
    "activation_sparsity_scale",
    "attention.compress_ratios",
    "attention.head_count_kv",
    "attention.indexer.types",
    "attention.recurrent_layers",
    "attention.rope_pattern",
    "attention.sliding_window_pattern",
    "classifier.output_labels",
    "feed_forward_length",
    "ple.head_offsets",
    "ple.head_vocab_sizes",
    "ple.layer_multipliers",
    "ple.layers",
    "rope.dimension_sections",
    "swiglu_clamp_exp",
    "swiglu_clamp_shexp",
)
_CHECKED_KEYS: Final = (
    "attention.value_length",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "expert_weights_scale",
    "tensor_data_layout",
    "pooling_type",  # see `families.embedding`
    "attention.causal",
)


def architectures(likely: str = "") -> Iterator[tuple[str, str, Architecture]]:
    """Yield the architectures of all families: their name in files, the model_type, and the rest. The type of the same
    name comes first, so that a caller that finds it there imports no others."""
    for model_type in sorted(TYPES, key=lambda model_type: model_type != likely.replace("-", "_")):
        name = f"forebay.families.{model_type}.gguf"
        if importlib.util.find_spec(name) is not None:
            for stored, architecture in importlib.import_module(name).ARCHITECTURES.items():
                yield stored, model_type, architecture
    for model_type in TEXT_ENCODERS:
        module = importlib.import_module(f"forebay.families.text_encoders.{model_type}")
        for stored, architecture in getattr(module, "ARCHITECTURES", {}).items():
            yield stored, model_type, architecture


@functools.cache
def _find(name: str) -> tuple[str, Architecture] | None:
    return next(((kind, found) for known, kind, found in architectures(name) if known == name), None)


def architecture_of(file: GgufFile) -> tuple[str, Architecture]:
    """Return the model_type, and how its files are read. Raises ModelError if the file has a kind of model, or a part
    of one, that cannot be served."""
    name, kind = (file.metadata.get(f"general.{key}") for key in ("architecture", "type"))
    if kind not in (None, "model"):
        raise ModelError(f"{file.path}: general.type is {brief(kind)}: it is no language model by itself")
    found = _find(name) if isinstance(name, str) else None
    if found is None:
        known = ", ".join(name for name, *_ in architectures())
        raise ModelError(f"{file.path}: the GGUF architecture {brief(name)} is not supported; supported are {known}")
    return found


def hf_config(file: GgufFile) -> dict[str, Any]:
    """The file's metadata in the layout of a config.json."""
    model_type, architecture = architecture_of(file)
    own = _own_metadata(file, architecture)
    names = {**_CONFIG_KEYS, **architecture.keys}
    config: dict[str, Any] = {hf: own[key] for key, hf in names.items() if key in own}
    config["model_type"] = model_type
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None:
        config.setdefault("vocab_size", embedding.shape[0])
    if "head_dim" not in config and "rope.dimension_count" in own:
        config["head_dim"] = own["rope.dimension_count"]
    for key in {"rope.dimension_count", "attention.value_length"}.difference(architecture.keys, architecture.checked):
        if key in own and own[key] != config.get("head_dim", own[key]):
            raise ModelError(
                f"{file.path}: {key} is {brief(own[key])} and the head size {brief(config['head_dim'])}: unsupported"
            )
    config["rope_scaling"] = _rope_scaling(file, own)
    config.update(_token_ids(file.metadata))
    architecture.configure(Header(file, own, config))
    return config


def hf_name(file: GgufFile, architecture: Architecture, name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; experts' names keep a `{}` for the number."""
    stem, _, kind = name.rpartition(".")
    if stem in architecture.top_names:
        return f"{architecture.top_names[stem]}.{kind}"
    match = _BLOCK_TENSOR.fullmatch(name)
    if match is None or match[2] not in architecture.block_names:
        raise ModelError(f"{file.path}: tensor {name!r} is not part of such a model as known here")
    return f"{architecture.layers}.{int(match[1])}.{architecture.block_names[match[2]]}{match[3]}"


def _own_metadata(file: GgufFile, architecture: Architecture) -> dict[str, Any]:
    prefix = f"{file.metadata['general.architecture']}."
    own = {key[len(prefix) :]: value for key, value in file.metadata.items() if key.startswith(prefix)}
    known = {*_CONFIG_KEYS, *_CHECKED_KEYS, *architecture.keys, *architecture.checked}
    for key, value in own.items():
        if key not in known:
            raise ModelError(
                f"{file.path}: the metadata key {prefix + key!r} is not supported: the results could be wrong"
            )
        if not isinstance(value, int | float | str) and not (key in architecture.checked and key in _LISTS):
            raise ModelError(f"{file.path}: {prefix + key!r} is a list: layers of different shapes are not supported")
    if own.get("attention.causal", architecture.causal) is not architecture.causal:
        raise ModelError(
            f"{file.path}: {prefix}attention.causal is {brief(own['attention.causal'])}: attention to later tokens is "
            "not served"
        )
    honoured = "expert_weights_scale" in architecture.keys
    if not honoured and own.get("expert_weights_scale", 1.0) not in (0.0, 1.0):
        raise ModelError(f"{file.path}: {prefix}expert_weights_scale {own['expert_weights_scale']!r} is not supported")
    return own


def _rope_scaling(file: GgufFile, own: Mapping[str, Any]) -> dict[str, Any] | None:
    kind = own.get("rope.scaling.type", "none")
    if any(name in file.tensors for name in LONG_ROPE.values()):
        return _long_rope(file, own)
    if ROPE_FACTORS in file.tensors:
        if kind != "none":
            raise ModelError(
                f"{file.path}: it has both {ROPE_FACTORS} and rope.scaling.type {brief(kind)}: unsupported"
            )
        return {"rope_type": "frequency_factors", "factors": _rope_factors(file, ROPE_FACTORS)}
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": own.get("rope.scaling.factor")}
    if "rope.scaling.original_context_length" in own and kind != "linear":
        scaling["original_max_position_embeddings"] = own["rope.scaling.original_context_length"]
    return scaling


def _long_rope(file: GgufFile, own: Mapping[str, Any]) -> dict[str, Any]:
    if missing := next((name for name in LONG_ROPE.values() if name not in file.tensors), ""):
        raise ModelError(f"{file.path}: {missing} is missing, the other list of a LongRoPE's factors")
    length = {"original_max_position_embeddings": own.get("rope.scaling.original_context_length")}
    amplitude = {"attention_factor": own[LONG_ROPE_AMPLITUDE]} if LONG_ROPE_AMPLITUDE in own else {}
    factors = {ours: _rope_factors(file, name) for ours, name in LONG_ROPE.items()}
    return {"rope_type": "longrope", **factors, **length, **amplitude}


def _rope_factors(file: GgufFile, name: str) -> list[float]:
    """Return divisors of frequencies: of Llama 3's scaling, which llama.cpp's converter computes once and stores, or of
    a LongRoPE."""
    tensor = file.tensors[name]
    if tensor.type.name != "F32" or math.prod(tensor.shape) > _MAX_ROPE_FACTORS:
        raise ModelError(f"{file.path}: {name} is {tensor.type.name} {tensor.shape}, not a short list of F32")
    factors: list[float] = file.raw(name).read().view(np.float32).reshape(-1).tolist()
    return factors


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """End of sequence, of turn and of message all end an answer."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = [metadata[f"tokenizer.ggml.{key}"] for key in keys if f"tokenizer.ggml.{key}" in metadata]
    return {"bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"), "eos_token_id": ends}
