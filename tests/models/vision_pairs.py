"""A small model with an encoder as a folder of safetensors and as two GGUF files, of the same weights and tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import gguf
import numpy as np
import torch
from transformers import AutoModelForImageTextToText

from forebay.cli.main import main
from forebay.families.checkpoint import Checkpoint, open_checkpoint
from forebay.families.config.model_config import ModelConfig, config_from_gguf
from forebay.families.small import small_config
from forebay.families.small_pictures import SMALL, template
from forebay.formats.gguf import GgufFile
from forebay.formats.stored_tensor import read_tensor
from tests.formats.gguf_files import write_gguf
from tests.models import test_gguf_gemma4
from tests.models.mmproj_files import interleaved, write_mmproj
from tests.models.test_gguf_window import common_metadata, gemma3_tensors, lfm2_metadata, lfm2_tensors

PAIRS: Final = (
    *("gemma3", "gemma4", "gemma4_unified", "internvl", "lfm2_vl"),
    *("mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "smolvlm"),
)
_CONTROL, _PADDING = 3, 0
_SHAPE: Final = {"hidden_size": 32, "num_layers": 3}
_HALVES: Final = {"clip__vision__image_mean": [0.5] * 3, "clip__vision__image_std": [0.5] * 3}
_QWEN: Final = {**_HALVES, "clip__vision__image_min_pixels": 1024, "clip__vision__image_max_pixels": 4096}
# What the small models have where those of the tests of encoders have something else.
_ENCODERS: Final[dict[str, dict[str, Any]]] = {
    "internvl": {"clip__vision__preproc_max_tiles": 4},
    "mistral3": {"clip__use_gelu": None, "clip__use_silu": True},
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), _QWEN),
}
# What GGUF files cannot say is as in published checkpoints: fields of the configuration, and of the processor.
_FIELDS: Final[dict[str, dict[str, dict[str, Any]]]] = {
    "gemma4": {
        "vision_config": {"position_embedding_size": 560},
        "text_config": {"use_bidirectional_attention": None, "enable_moe_block": False},
    },
    "gemma4_unified": {"vision_config": {"mm_posemb_size": 280}, "text_config": {"enable_moe_block": False}},
}
_PROCESSORS: Final[dict[str, dict[str, Any]]] = {
    "gemma4": {"max_soft_tokens": 280},
    "gemma4_unified": {"max_soft_tokens": 280},
    "lfm2_vl": {"tile_size": 512, "min_image_tokens": 64, "max_image_tokens": 256, "max_num_patches": 1024},
}


class Language(NamedTuple):
    """What llama.cpp's converter does to the tensors of a language model, and writes besides the common metadata."""

    arch: gguf.MODEL_ARCH
    tensors: Callable[[str, np.ndarray, ModelConfig], Iterator[tuple[str, np.ndarray]]]
    metadata: Callable[[ModelConfig], dict[str, Any]]


class Pair(NamedTuple):
    """The folder, the language model's file and the encoder's, which is found beside it."""

    folder: Path
    model: Path
    mmproj: Path


def make_pair(kind: str, donor: Path, path: Path, *, chat_template: str | None = None) -> Pair:
    """Make a pair in the folder `path`, with the tokens of the GGUF file `donor`. The GGUF model has the
    `chat_template`, by default that of the folder."""
    folder, file = path / "folder", GgufFile(donor)
    fields = small_config(kind, **_SHAPE, vocab_size=config_from_gguf(file).vocab_size)
    own = {name: {**fields[name], **more} for name, more in _FIELDS.get(kind, {}).items()}
    more = [f"--set={name}={json.dumps(value)}" for name, value in own.items()]
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in _SHAPE.items()]
    assert main(["models", "make", "--like", kind, "--out", str(folder), "--dtype=float32", *sizes, *more]) == 0
    for name in SMALL[kind].files:
        _set_processor(folder / name, _PROCESSORS.get(kind, {}))
    tokens = _tokens(file, kind, template(kind) if chat_template is None else chat_template)
    model = _write_language_model(open_checkpoint(folder), path / f"{kind}-F32.gguf", tokens)
    oracle = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    mmproj = write_mmproj(path / f"{kind}-mmproj-F32.gguf", oracle, **_ENCODERS.get(kind, {}))
    return Pair(folder, model, mmproj)


def _set_processor(path: Path, own: dict[str, Any]) -> None:
    fields = json.loads(path.read_text())
    image = fields.get("image_processor", fields)
    image.update({name: value for name, value in own.items() if name in image})
    path.write_text(json.dumps(fields))


def _tokens(file: GgufFile, kind: str, chat_template: str) -> dict[str, Any]:
    """Return the tokenizer of the file with the tokens of images behind its own."""
    more = SMALL[kind].tokens
    found = {name: value for name, value in file.metadata.items() if name.startswith("tokenizer.ggml.")}
    types = [*found["tokenizer.ggml.token_type"].tolist(), *[_CONTROL] * len(more)]
    return {
        **found,
        "tokenizer.ggml.tokens": [*found["tokenizer.ggml.tokens"], *more],
        "tokenizer.ggml.merges": list(found["tokenizer.ggml.merges"]),
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.padding_token_id": _PADDING,
        "tokenizer.chat_template": chat_template,
    }


def _as_they_are(name: str, values: np.ndarray, config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    yield name, values


def _interleaved(name: str, values: np.ndarray, config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}.get(name.split(".")[-2])
    yield name, interleaved(values, heads) if heads else values


def _gemma4(name: str, values: np.ndarray, config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    yield name + ".weight" * name.endswith("layer_scalar"), values


def _window(config: ModelConfig) -> dict[str, Any]:
    return {"attention.sliding_window": config.sliding_window}


def _sections(config: ModelConfig) -> dict[str, Any]:
    assert config.rope_sections is not None
    return {"rope.dimension_sections": [*config.rope_sections.sizes, 0]}


def _deepstack(config: ModelConfig) -> dict[str, Any]:
    return {**_sections(config), "n_deepstack_layers": len(config.vision.deepstack)}


_LANGUAGES: Final = {
    "gemma3": Language(gguf.MODEL_ARCH.GEMMA3, lambda *named: gemma3_tensors(*named[:2]), _window),
    "gemma4": Language(gguf.MODEL_ARCH.GEMMA4, _gemma4, test_gguf_gemma4.metadata_of),
    "gemma4_unified": Language(gguf.MODEL_ARCH.GEMMA4, _gemma4, test_gguf_gemma4.metadata_of),
    "internvl": Language(gguf.MODEL_ARCH.QWEN2, _as_they_are, lambda config: {}),
    "lfm2_vl": Language(gguf.MODEL_ARCH.LFM2, lambda *named: lfm2_tensors(*named[:2]), lfm2_metadata),
    "mistral3": Language(gguf.MODEL_ARCH.LLAMA, _interleaved, _window),
    "qwen2_5_vl": Language(gguf.MODEL_ARCH.QWEN2VL, _as_they_are, _sections),
    "qwen2_vl": Language(gguf.MODEL_ARCH.QWEN2VL, _as_they_are, _sections),
    "qwen3_vl": Language(gguf.MODEL_ARCH.QWEN3VL, _as_they_are, _deepstack),
    "smolvlm": Language(gguf.MODEL_ARCH.LLAMA, _interleaved, lambda config: {}),
}


def _write_language_model(checkpoint: Checkpoint, path: Path, tokens: dict[str, Any]) -> Path:
    config = checkpoint.config
    assert config.vision is not None
    language = _LANGUAGES[config.vision.kind]
    names = gguf.get_tensor_name_map(language.arch, config.num_layers)
    tensors = {}
    for stored, tensor in checkpoint.tensors.items():
        for name, values in language.tensors(stored, read_tensor(tensor), config):
            tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = np.ascontiguousarray(values)
    if language.arch == gguf.MODEL_ARCH.GEMMA4:
        tensors["rope_freqs.weight"] = test_gguf_gemma4.rope_factors(config)
    written = {**common_metadata(config), **language.metadata(config), **tokens}
    kept = {key: value for key, value in written.items() if value is not None}
    return write_gguf(path, kept, tensors, architecture=gguf.MODEL_ARCH_NAMES[language.arch])
