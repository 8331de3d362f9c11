"""GGUF files of text encoders, as llama.cpp's converter makes them of transformers' models (conversion/bert.py)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import gguf
import numpy as np
from safetensors.numpy import load_file

from forebay.families.checkpoint import Checkpoint, open_checkpoint
from tests.formats.gguf_files import write_gguf


class Conversion(NamedTuple):
    """The architecture, the prefix that names of tensors lose, and the model of the tokenizer."""

    arch: gguf.MODEL_ARCH
    prefix: str
    tokenizer: str


CONVERSIONS: Final = {
    "bert": Conversion(gguf.MODEL_ARCH.BERT, "bert.", "bert"),
    "roberta": Conversion(gguf.MODEL_ARCH.BERT, "roberta.", "gpt2"),
    "xlm_roberta": Conversion(gguf.MODEL_ARCH.BERT, "roberta.", "t5"),
    "nomic_bert": Conversion(gguf.MODEL_ARCH.NOMIC_BERT, "", "bert"),
    "modernbert": Conversion(gguf.MODEL_ARCH.MODERN_BERT, "model.", "gpt2"),
    "jina_bert_v2": Conversion(gguf.MODEL_ARCH.JINA_BERT_V2, "bert.", "bert"),
    "eurobert": Conversion(gguf.MODEL_ARCH.EUROBERT, "", "gpt2"),
    "gemma3_text": Conversion(gguf.MODEL_ARCH.GEMMA_EMBEDDING, "", "llama"),
}
_LIKE_DECODERS: Final = ("eurobert", "gemma3_text")
_LEFT_OUT: Final = ("pooler.", "cls.predictions", "decoder.", "lm_head.", "embeddings.position_ids")


def write_encoder(
    source: Path,
    case: str,
    path: Path,
    *,
    labels: tuple[str, ...] = (),
    more: Mapping[str, np.ndarray] = MappingProxyType({}),
    **changes: Any,
) -> Path:
    """Write the checkpoint in `source` as a GGUF file, with `more` tensors. `changes` of the metadata have `__` for a
    dot; None leaves one out."""
    conversion, checkpoint = CONVERSIONS[case], open_checkpoint(source)
    name = gguf.MODEL_ARCH_NAMES[conversion.arch]
    names = gguf.get_tensor_name_map(conversion.arch, checkpoint.config.num_layers)
    tensors = {}
    for stored, values in load_file(source / "model.safetensors").items():
        here = stored.removeprefix(conversion.prefix)
        if not here.startswith(_LEFT_OUT) and (labels or not here.startswith(("head.", "classifier."))):
            tensors[_named(here, case, names)] = _converted(here, values, checkpoint)
    own = {f"{name}.{key}": value for key, value in _metadata(checkpoint, case).items()}
    own |= {f"{name}.classifier.output_labels": list(labels)} if labels else {}
    own |= {key.replace("__", "."): value for key, value in changes.items()}
    extra = {"tokenizer.ggml.model": conversion.tokenizer, "tokenizer.ggml.padding_token_id": 1, **own}
    there = {key: value for key, value in extra.items() if value is not None}
    return write_gguf(path, {}, {**tensors, **more}, architecture=name, extra=there)


def _named(name: str, case: str, names: gguf.TensorNameMap) -> str:
    if case == "modernbert" and name.startswith("classifier."):
        name = name.replace("classifier.", "classifier.out_proj.")
    name = f"model.{name}" if case in _LIKE_DECODERS else name
    if name.startswith("head.norm."):
        return name.replace("head.norm", "cls.norm")
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def _converted(name: str, values: np.ndarray, checkpoint: Checkpoint) -> np.ndarray:
    """Cut the rows of positions that no token has, and add 1 to Gemma's norms."""
    if checkpoint.config.model_type == "gemma3_text":
        return values + 1 if name.endswith("norm.weight") else values
    offset = getattr(checkpoint.config, "position_offset", 0)
    return values[offset:] if "position_embeddings" in name else values


def _metadata(checkpoint: Checkpoint, case: str) -> Mapping[str, Any]:
    config: Any = checkpoint.config
    common = {
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.layer_norm_epsilon": config.rms_norm_eps,
        "attention.causal": False,
        "pooling_type": 1,
    }
    if case == "nomic_bert":
        return {**common, "rope.freq_base": config.rope_theta}
    if case in _LIKE_DECODERS:
        epsilon = common.pop("attention.layer_norm_epsilon")
        window = {"attention.sliding_window": 2 * config.reach} if case == "gemma3_text" else {}
        window |= {"attention.sliding_window_pattern": 2} if window else {}
        return {
            **common,
            **window,
            "attention.layer_norm_rms_epsilon": epsilon,
            "attention.head_count_kv": config.num_kv_heads,
            "attention.key_length": config.head_dim,
            "attention.value_length": config.head_dim,
            "rope.freq_base": config.rope_theta,
        }
    if case == "modernbert":
        bases = {"rope.freq_base": config.rope_theta, "rope.freq_base_swa": config.local_theta}
        window = {"attention.sliding_window": 2 * config.reach, "attention.sliding_window_pattern": 3}
        return {**common, **bases, **window, "rope.scaling.type": "none", "vocab_size": config.vocab_size}
    return common
