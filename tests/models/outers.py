"""Tiny models with a language model inside, made by transformers, and their files under the names of both kinds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForImageTextToText

from tests.models.tiny import BASE, CASES, stable_topk

_VISION: Final = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_IMAGE: Final = {"image_size": 28, "patch_size": 14}
_SIGLIP: Final = _VISION | {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
_QWEN_VISION: Final = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48}
_SECTIONS: Final = {"rope_type": "default", "rope_theta": 5_000.0, "mrope_section": [1, 3, 2]}
_LLAVA: Final = {
    "lm_head.": "language_model.lm_head.",
    "model.language_model.": "language_model.model.",
    "model.": "",
}
_SAVED: Final = (
    "glm5_next",
    "qwen4_exp",
)  # transformers writes the names of published files, which its modules do not have
_SAME: Final[Mapping[str, str]] = {}
_QWEN2: Final = {"model.language_model.": "model.", "model.visual.": "visual."}


@dataclass(frozen=True, kw_only=True)
class Case:
    """`text` is the language model's type in `text_config`, `fields` those of its fields that differ from `BASE`, and
    `ours` its type here. `hub`: how transformers' names of tensors begin, and those of published files instead."""

    outer: str
    text: str
    ours: str
    vision: Mapping[str, Any]
    hub: Mapping[str, str]
    fields: Mapping[str, Any]
    more: Mapping[str, Any]


def _case(
    outer: str,
    text: str,
    vision: Mapping[str, Any],
    hub: Mapping[str, str],
    fields: Mapping[str, Any],
    *,
    ours: str = "",
    **more: Any,
) -> Case:
    return Case(outer=outer, text=text, ours=ours or text, vision=vision, hub=hub, fields=fields, more=more)


_QWEN3_VL: Final = _QWEN_VISION | {"patch_size": 4, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
_QWEN3_TEXT: Final = {"head_dim": 12, "rope_parameters": _SECTIONS | {"mrope_interleaved": True}}
_QWEN3_5: Final = _QWEN_VISION | {"patch_size": 4, "num_position_embeddings": 16}
_QWEN3_5_ROPE: Final = {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.5}
_GEMMA4: Final = _SIGLIP | {
    "head_dim": 16,
    "num_key_value_heads": 2,
    "patch_size": 8,
    "pooling_kernel_size": 2,
    "position_embedding_size": 24,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 7.0},
}
# transformers takes the placeholder in a text for padding: no text of a test has it.
_GEMMA4_TOKENS: Final[dict[str, Any]] = {"image_token_id": 7, "boi_token_id": 6, "eoi_token_id": 5}
_GEMMA4_UNIFIED: Final = {
    "global_head_dim": 20,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "num_kv_shared_layers": 1,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}
_MOE: Final = {**CASES["qwen3_moe"][1], "moe_intermediate_size": 20}
OUTERS: Final[dict[str, Case]] = {
    "smolvlm": _case(
        "smolvlm",
        "llama",
        _SIGLIP | {"image_size": 48, "patch_size": 8},
        _SAME,
        {},
        scale_factor=3,
        image_token_id=5,
    ),
    "idefics3": _case(
        "idefics3",
        "llama",
        _SIGLIP | {"image_size": 30, "patch_size": 7, "num_attention_heads": 3},  # two pixels fill no patch
        _SAME,
        {"attention_bias": True},
        tie_word_embeddings=True,
        image_token_id=7,
    ),
    "gemma3": _case(
        "gemma3",
        "gemma3_text",
        _SIGLIP | {"image_size": 49, "patch_size": 8, "vision_use_head": False},  # a pixel fills no patch
        {"model.vision_tower.": "vision_tower.vision_model.", **_LLAVA},
        CASES["gemma3_text"][1] | {"sliding_window": 3},  # an image is wider
        mm_tokens_per_image=4,
        image_token_index=5,
        boi_token_index=6,
        eoi_token_index=7,
    ),
    "gemma4": _case(  # as the small ones: bounds, inputs of layers, KV of other layers
        "gemma4",
        "gemma4_text",
        _GEMMA4 | {"num_key_value_heads": 1, "use_clipped_linears": True},
        _SAME,
        CASES["gemma4_text"][1] | {"sliding_window": 3, "use_bidirectional_attention": "vision", "pad_token_id": 9},
        **_GEMMA4_TOKENS,
    ),
    "gemma4-experts": _case(  # as the large ones: a mean and a scale, experts
        "gemma4",
        "gemma4_text",
        _GEMMA4 | {"num_attention_heads": 3, "num_key_value_heads": 3, "standardize": True},
        _SAME,
        CASES["gemma4_text-experts"][1]
        | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_bidirectional_attention": "vision"},
        **_GEMMA4_TOKENS,
    ),
    "gemma4-causal": _case(
        "gemma4", "gemma4_text", _GEMMA4, _SAME, CASES["gemma4_text"][1] | {"pad_token_id": 9}, **_GEMMA4_TOKENS
    ),
    "gemma3n": _case(
        "gemma3n",
        "gemma3n_text",
        {"hidden_size": 16, "vocab_size": 4, "vocab_offset": 96},
        _SAME,
        CASES["gemma3n_text"][1],
        audio_config={"hidden_size": 16, "vocab_size": 4, "vocab_offset": 100},
    ),
    "glm5_next": _case(
        "glm5_next",
        "glm5_next_text",
        {**_QWEN_VISION, "patch_size": 4, "projection_intermediate_size": 20},
        _SAME,
        CASES["glm5_next_text"][1],
    ),
    "gemma4_unified": _case(
        "gemma4_unified",
        "gemma4_unified_text",
        {"patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 40, "mm_posemb_size": 24, "output_proj_dims": 40},
        _SAME,
        {**_GEMMA4_UNIFIED, "sliding_window": 3, "use_bidirectional_attention": "vision", "pad_token_id": 9},
        ours="gemma4_text",
        **_GEMMA4_TOKENS,
    ),
    "mistral3": _case(
        "mistral3",
        "mistral",
        _SIGLIP | {"model_type": "pixtral", "head_dim": 12, "image_size": 48, "patch_size": 8},
        _LLAVA,
        {"sliding_window": None},
        tie_word_embeddings=False,
        image_token_index=7,
    ),
    "mistral3-ministral3": _case(
        "mistral3",
        "ministral3",
        _VISION | _IMAGE | {"model_type": "pixtral", "head_dim": 8},
        _LLAVA,
        CASES["ministral3"][1],
    ),
    "muse_glimmer": _case(
        "muse_glimmer",
        "muse_glimmer_text",
        # Windows of 4 x 4 patches, in the first layer of two.
        _SIGLIP | {"num_attention_heads": 3, "patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4},
        _SAME,
        CASES["muse_glimmer_text"][1],
        image_token_id=7,
        out_hidden_size=96,
        projector_hidden_size=40,
    ),
    "internvl": _case(
        "internvl",
        "qwen2",
        _SIGLIP | {"image_size": [32, 32], "patch_size": [8, 8], "attention_bias": True},
        _LLAVA,
        {},
        image_token_id=5,
    ),
    "internvl-qwen3": _case(
        "internvl",
        "qwen3",
        _SIGLIP
        | {
            "image_size": [56, 56],
            "patch_size": [14, 14],
            "norm_type": "rms_norm",
            "use_qk_norm": True,
            "use_mean_pooling": False,
            "num_attention_heads": 3,
        },
        _LLAVA,
        {"head_dim": 20},
        tie_word_embeddings=False,
        image_token_id=5,
        downsample_ratio=0.25,
    ),
    "llava": _case(
        "llava", "llama", _VISION | _IMAGE | {"model_type": "clip_vision_model", "projection_dim": 16}, _LLAVA, {}
    ),
    "kimi_k25": _case(
        "kimi_k25",
        "deepseek_v3",
        _SIGLIP | {"num_attention_heads": 3, "patch_size": 4, "pos_emb_height": 4, "pos_emb_width": 4},
        _LLAVA,
        CASES["deepseek_v3"][1],
        tie_word_embeddings=False,
        image_token_id=7,
        projection_hidden_size=24,
    ),
    "lfm2_vl": _case(
        "lfm2_vl",
        "lfm2",
        _SIGLIP | {"model_type": "siglip2_vision_model", "num_patches": 16, "patch_size": 8},
        {"model.vision_tower.": "model.vision_tower.vision_model."},
        CASES["lfm2"][1],
        image_token_id=6,
        projector_hidden_size=40,
    ),
    "qwen2_vl": _case(
        "qwen2_vl",
        "qwen2_vl_text",
        {"depth": 1, "embed_dim": 16, "hidden_size": 48, "num_heads": 2, "mlp_ratio": 3, "patch_size": 4},
        _QWEN2,
        {"rope_parameters": _SECTIONS},
        ours="qwen2",
        image_token_id=5,
    ),
    "qwen2_5_vl": _case(
        "qwen2_5_vl",
        "qwen2_5_vl_text",
        # Windows of 2 x 2 tokens, and as many columns of the gate as are no multiple of a vector's.
        _QWEN_VISION | {"patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1], "intermediate_size": 19},
        _QWEN2,
        {
            "rope_parameters": _SECTIONS | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
        },
        ours="qwen2",
        tie_word_embeddings=True,
        image_token_id=5,
    ),
    "qwen3_5": _case(
        "qwen3_5",
        "qwen3_5_text",
        _QWEN3_5,
        _SAME,
        {**CASES["qwen3_5_text"][1], "rope_parameters": _SECTIONS | _QWEN3_5_ROPE},
        image_token_id=5,
    ),
    "qwen3_5_moe": _case(
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        _QWEN3_5,
        _SAME,
        {**CASES["qwen3_5_moe_text"][1], "rope_parameters": _SECTIONS | _QWEN3_5_ROPE},
        image_token_id=5,
    ),
    "qwen4_exp": _case(
        "qwen4_exp",
        "qwen4_exp_text",
        _QWEN3_5,
        _SAME,
        {
            **CASES["qwen4_exp_text"][1],
            "rope_parameters": _SECTIONS | _QWEN3_5_ROPE,
        },
        image_token_id=5,
    ),
    "qwen4_exp-ngrams": _case(
        "qwen4_exp",
        "qwen4_exp_text",
        _QWEN3_5,
        _SAME,
        {**CASES["qwen4_exp_text-ngrams"][1], "rope_parameters": _SECTIONS | _QWEN3_5_ROPE},
        image_token_id=6,
    ),
    "qwen3_vl": _case("qwen3_vl", "qwen3_vl_text", _QWEN3_VL, _SAME, _QWEN3_TEXT, ours="qwen3", image_token_id=5),
    "qwen3_vl_moe": _case(
        "qwen3_vl_moe",
        "qwen3_vl_moe_text",
        _QWEN3_VL,
        _SAME,
        {**_MOE, **_QWEN3_TEXT},
        ours="qwen3_moe",
        image_token_id=5,
    ),
}


@contextmanager
def _towers_of_gemma3n() -> Iterator[None]:
    """Inside, a matrix stands for each of Gemma 3n's encoders, of which texts need nothing, and transformers a package
    that is not here."""
    made: Any = AutoModel.from_config

    def from_config(config: Any, **options: Any) -> Any:
        tower = config.model_type in ("gemma3n_vision", "gemma3n_audio")
        return torch.nn.Linear(1, 1) if tower else made(config, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AutoModel, "from_config", from_config)
        yield


def make_outer(case: Case, *, seed: int = 0, **more: Any) -> Any:
    """The oracle, with every weight random."""
    text = {**BASE, **case.fields, "model_type": case.text}
    config = AutoConfig.for_model(case.outer, text_config=text, vision_config=dict(case.vision), **case.more, **more)
    with _towers_of_gemma3n():
        make: Any = AutoModelForImageTextToText.from_config
        oracle = make(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in oracle.named_parameters():
            values = torch.randn(weight.shape, generator=generator)
            weight.copy_(weight.mean() + 0.3 * values if "norm" in name else 0.15 * values)
        for name, stored in oracle.named_buffers():
            values = torch.rand(stored.shape, generator=generator)
            if name.endswith(("_min", "_max")):  # what is held within them is beyond by turns
                stored.copy_((0.3 + values) * (-1 if name.endswith("_min") else 1))
            elif name.endswith(("std_bias", "std_scale")):
                stored.copy_(0.5 + values)
    return oracle


def save_as_published(oracle: Any, case: Case, folder: Path) -> Path:
    """With the names that the hub's files have."""
    oracle.config.save_pretrained(folder)
    save_file(published(oracle, case), folder / "model.safetensors")
    return folder


def _saved(oracle: Any) -> dict[str, Tensor]:
    with TemporaryDirectory() as folder:
        oracle.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def _kimi_name(saved: str) -> str:
    """What published files call a tensor. transformers 5.24 gives some names back that its modules have, and others to
    parts that do not have them."""
    name = saved.replace("language_model.model.blocks.", "language_model.model.layers.")
    return name.removeprefix("model.").replace("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed.")


def published(oracle: Any, case: Case) -> dict[str, Tensor]:
    """All tensors, each once, under the names of the hub's files."""
    if case.outer in _SAVED:
        return _saved(oracle)
    if case.outer == "kimi_k25":
        return {_kimi_name(name): values for name, values in _saved(oracle).items()}
    tied = getattr(oracle.config, "tie_word_embeddings", False)
    tensors: dict[str, Tensor] = {}
    for name, values in oracle.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        begin = next((begin for begin in case.hub if name.startswith(begin)), "")
        stored = case.hub[begin] + name.removeprefix(begin) if begin else name
        if case.outer == "qwen3_vl_moe" and ".experts." in name:
            values = values.transpose(1, 2)
        tensors[stored] = values.detach().clone().contiguous()
    return tensors


@torch.no_grad()
def logits_of(oracle: Any, ids: list[int]) -> Tensor:
    """[len(ids), V], of text alone."""
    with stable_topk():
        logits: Tensor = oracle(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def rewrite(folder: Path, change: Any) -> Path:
    """Change the fields of the folder's config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    return folder
