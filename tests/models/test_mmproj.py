"""Vision encoders in GGUF files: the same encoder, of the same weights, as in safetensors."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from forebay.base.errors import ModelError
from forebay.config.resolve import resolve
from forebay.engine.lifecycle.model_shape import read_shape
from forebay.families.checkpoint import Checkpoint, open_checkpoint, open_with_encoder
from forebay.families.config.model_config import ProcessorFiles
from forebay.families.config.vision.base import VisionConfig
from forebay.families.config.vision.gemma4 import Gemma4VisionConfig
from forebay.families.config.vision.qwen2 import Qwen2Config
from forebay.families.parts.mmproj.reader import Mmproj, open_mmproj
from forebay.formats.stored_tensor import read_tensor
from forebay.models.encoder import load_encoder
from forebay.ops import Ops
from forebay.server.images.tiling import tiling_at
from forebay.server.images.tilings.internvl import grid_tiles
from tests.models.mmproj_files import vocabulary, write_language_model, write_mmproj
from tests.models.outers import OUTERS, make_outer
from tests.together import together

NAMES = [
    *("smolvlm", "lfm2_vl", "mistral3", "gemma3", "gemma4", "gemma4_unified", "internvl"),
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl"),
]
SLOW = [
    "internvl-qwen3",
    "idefics3",
    "gemma4-experts",
    "gemma4-causal",
    "qwen3_vl_moe",
    "qwen3_5",
    "qwen3_5_moe",
]

SHIFTED = "model.multi_modal_projector.mm_soft_emb_norm.weight"

Made = tuple[Any, Checkpoint]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """The model of a case, and its checkpoint as transformers saves it, made once."""
    known: dict[str, Made] = {}

    def make(name: str) -> Made:
        if name not in known:
            oracle, folder = make_outer(OUTERS[name]), tmp_path_factory.mktemp(name)
            oracle.save_pretrained(folder)
            known[name] = oracle, open_checkpoint(folder)
        return known[name]

    return make


def opened(path: Path, checkpoint: Checkpoint) -> Mmproj:
    """Open a file beside the language model of a checkpoint."""
    config = checkpoint.config
    sections = (0, 0, 0) if config.rope_sections is None else config.rope_sections.sizes
    metadata = vocabulary(config.vision.kind, padding=getattr(config.vision, "padding", 0), sections=sections)
    return open_mmproj(path, replace(config, vision=None, rope_sections=None), metadata)


def as_in_gguf(vision: VisionConfig, kind: str) -> VisionConfig:
    """Return a configuration as far as a GGUF file can have it: floats of 32 bits, one rope of Gemma 4, no layers that
    do not exist."""
    if isinstance(vision, Gemma4VisionConfig):
        vision = replace(vision, theta=100.0)
    if isinstance(vision, Qwen2Config):
        vision = replace(vision, whole=vision.whole & frozenset(range(vision.num_layers)))
    mean, std = (tuple(float(str(np.float32(each))) for each in own) for own in (vision.mean, vision.std))
    return replace(vision, kind=kind, mean=mean, std=std)


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_encoder_of_a_gguf_file_equals_that_of_safetensors(
    name: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    oracle, checkpoint = made(name)
    found = opened(write_mmproj(tmp_path / "mmproj.gguf", oracle), checkpoint)
    vision = found.config.vision
    assert vision == as_in_gguf(checkpoint.config.vision, vision.kind)
    assert found.config.rope_sections == checkpoint.config.rope_sections
    assert found.config.unknown_options == checkpoint.config.unknown_options
    assert found.tensors.keys() == checkpoint.encoder.keys()
    for stored, tensor in found.tensors.items():
        expected = checkpoint.encoder[stored]
        assert tensor.shape == expected.shape, stored
        tolerance = 1e-7 if stored == SHIFTED else 0.0  # 1 is added to it, in float32
        np.testing.assert_allclose(read_tensor(tensor), read_tensor(expected), 0, tolerance)


def test_encoder_with_the_names_of_old_files_equals_that_of_new_ones(
    made: Callable[[str], Made], tmp_path: Path
) -> None:
    oracle, checkpoint = made("smolvlm")
    found = opened(write_mmproj(tmp_path / "mmproj.gguf", oracle, swapped=True), checkpoint)
    assert found.tensors.keys() == checkpoint.encoder.keys()
    for stored, tensor in found.tensors.items():
        assert np.array_equal(read_tensor(tensor), read_tensor(checkpoint.encoder[stored])), stored


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"general__architecture": "llama"}, "is no vision encoder: name an mmproj file"),
        ({"clip__projector_type": "ldp"}, "the projector type 'ldp' is not supported; supported are gemma3, "),
        ({"clip__projector_type": 7}, "the projector type 7 is not supported"),
        ({"clip__projector_type": None}, "the projector type is missing; supported are"),
        ({"clip__has_vision_encoder": False}, "audio is not served"),
        ({"clip__projector_type": "lfm2"}, "for lfm2 models, and the language model's type is llama"),
        ({"clip__use_gelu": False}, "its MLPs have neither clip.use_gelu nor clip.use_silu"),
        ({"clip__use_silu": True}, "its MLPs have clip.use_gelu and clip.use_silu"),
        ({"clip__vision__block_count": 1 << 20}, "num_hidden_layers is 1048576"),
        ({"clip__vision__patch_size": "8"}, "patch_size is '8'"),
        ({"clip__vision__patch_size": 0}, "patch_size is 0"),
        ({"clip__vision__attention__head_count": 5}, "24 dimensions do not divide into 5 heads"),
        ({"clip__vision__image_mean": [0.5]}, "image_mean"),
        ({"clip__vision__projector__scale_factor": 0}, "scale_factor is 0"),
    ],
    ids=str,
)
def test_encoder_with_other_metadata_is_refused_with_the_reason(
    changes: dict[str, Any], told: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    oracle, checkpoint = made("smolvlm")
    path = write_mmproj(tmp_path / "mmproj.gguf", oracle, **changes)
    with pytest.raises(ModelError, match=re.escape(told)) as refused:
        opened(path, checkpoint)
    assert str(path) in refused.value.message


@together(
    "name, changes, told",
    [
        ("internvl", {"clip__use_gelu": False}, "its MLPs have neither clip.use_gelu nor clip.use_silu"),
        ("internvl", {"clip__vision__projector__scale_factor": 0}, "scale_factor is 0"),
        ("internvl", {"clip__vision__projector__scale_factor": 3}, "do not divide into groups of 3"),
        ("internvl", {"clip__vision__image_size": 1 << 20}, "image_size is 1048576"),
        ("internvl", {"without": "mm.model.mlp.3.weight"}, "'mm.model.mlp.3.weight' is missing"),
        ("internvl", {"without": "v.blk.0.ffn_up.weight"}, "'v.blk.0.ffn_up.weight' is missing"),
        ("gemma4_unified", {"clip__vision__block_count": 2}, "block_count is 2; it must be 0"),
        ("gemma4_unified", {"clip__vision__patch_size": 0}, "patch_size is 0"),
        ("gemma4_unified", {"clip__vision__patch_size": 3}, "model_patch_size is 8; it must be 6"),
        ("gemma4_unified", {"clip__vision__patch_size": 1 << 16}, "patch_size is 65536"),
        ("gemma4_unified", {"clip__vision__projector__scale_factor": 3}, "scale_factor is 3; it must be 2"),
        ("gemma4_unified", {"clip__vision__embedding_length": 41}, "embedding_length is 41; it must be 40"),
        ("gemma4_unified", {"without": "v.patch_norm.1.weight"}, "'v.patch_norm.1.weight' is missing"),
        ("gemma4_unified", {"without": "v.position_embd.weight"}, "'v.position_embd.weight' is missing"),
    ],
)
def test_encoder_of_a_hostile_file_is_refused_with_the_reason(
    name: str, changes: dict[str, Any], told: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    oracle, checkpoint = made(name)
    path = write_mmproj(tmp_path / "mmproj.gguf", oracle, **changes)
    with pytest.raises(ModelError, match=re.escape(told)) as refused:
        opened(path, checkpoint)
    assert str(path) in refused.value.message


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"v.patch_norm.1.weight": (191,)}, "191 numbers, which are no square of pixels in 3 channels"),
        ({"v.patch_norm.1.bias": (48,)}, "weights of the shape (48,) are not of 8 x 8 pixels, 192 numbers"),
        ({"v.patch_embd.weight": (40, 48)}, "weights of the shape (40, 48) are not of 8 x 8 pixels, 192 numbers"),
        ({"v.position_embd.weight": (48, 40)}, "'v.position_embd.weight' has the shape (48, 40)"),
    ],
    ids=str,
)
def test_patches_of_another_shape_are_refused_with_both_sizes(
    changed: dict[str, tuple[int, ...]], told: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    oracle, checkpoint = made("gemma4_unified")
    path = write_mmproj(tmp_path / "mmproj.gguf", oracle, shapes=changed)
    with pytest.raises(ModelError, match=re.escape(told)):
        opened(path, checkpoint)


def test_encoder_of_internvl_has_the_factor_of_its_file(made: Callable[[str], Made], tmp_path: Path) -> None:
    oracle, checkpoint = made("internvl")
    path = write_mmproj(tmp_path / "mmproj.gguf", oracle, clip__vision__projector__scale_factor=4)
    assert opened(path, checkpoint).config.vision.merge == 4


def test_tiles_of_internvl_are_at_most_those_of_the_file(made: Callable[[str], Made], tmp_path: Path) -> None:
    oracle, checkpoint = made("internvl")
    found = opened(write_mmproj(tmp_path / "mmproj.gguf", oracle), checkpoint)
    tiling = grid_tiles(ProcessorFiles(found.processor, {}, "mmproj.gguf"), found.config.vision)
    assert (tiling.min_tiles, tiling.max_tiles) == (1, 6)


def test_encoder_of_another_model_is_refused_with_both_widths(made: Callable[[str], Made], tmp_path: Path) -> None:
    oracle, checkpoint = made("smolvlm")
    path = write_mmproj(tmp_path / "mmproj.gguf", oracle)
    other = replace(checkpoint, config=replace(checkpoint.config, hidden_size=64))
    with pytest.raises(ModelError, match="its tokens have 48 numbers, and the language model's have 64"):
        opened(path, other)


def test_encoder_beside_a_vocabulary_without_its_token_is_refused(made: Callable[[str], Made], tmp_path: Path) -> None:
    oracle, checkpoint = made("smolvlm")
    path = write_mmproj(tmp_path / "mmproj.gguf", oracle)
    alone = replace(checkpoint.config, vision=None)
    for metadata in ({}, {"tokenizer.ggml.tokens": ["a", "<img>"]}):
        with pytest.raises(ModelError, match="has no token '<image>'"):
            open_mmproj(path, alone, metadata)


def test_encoder_file_with_a_tensor_too_few_or_too_many_is_refused(made: Callable[[str], Made], tmp_path: Path) -> None:
    oracle, checkpoint = made("smolvlm")
    path = write_mmproj(tmp_path / "mmproj.gguf", oracle, without="mm.model.fc.weight")
    with pytest.raises(ModelError, match=r"the tensor 'mm\.model\.fc\.weight' is missing"):
        opened(path, checkpoint)
    write_mmproj(path, oracle)
    path.write_bytes(path.read_bytes().replace(b"v.blk.0.attn_q.weight", b"v.blk.0.attn_x.weight"))
    with pytest.raises(ModelError, match=r"'v\.blk\.0\.attn_x\.weight' is no part of such an encoder"):
        opened(path, checkpoint)


@together("cut", [0, 3, 24, 100, 1000, -1])
def test_encoder_file_that_is_cut_is_refused(cut: int, made: Callable[[str], Made], tmp_path: Path) -> None:
    oracle, checkpoint = made("smolvlm")
    path = write_mmproj(tmp_path / "mmproj.gguf", oracle)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ModelError, match=re.escape(str(path))):
        opened(path, checkpoint)


def test_gguf_model_is_opened_planned_and_cut_with_the_encoder_beside_it(
    made: Callable[[str], Made], native: Ops, tmp_path: Path
) -> None:
    oracle, checkpoint = made("smolvlm")
    path = write_language_model(tmp_path / "model-Q8_0.gguf", checkpoint)
    mmproj = write_mmproj(tmp_path / "mmproj-F16.gguf", oracle)
    found = resolve({"model_path": str(path), "context_length": 64}).engine.pictures.mmproj
    assert found == str(mmproj)

    opened = open_with_encoder(path)
    assert opened.mmproj == mmproj
    ours = encoding_of(opened, native)
    assert torch.equal(ours, encoding_of(checkpoint, native))
    assert ours.abs().max() > 0.1

    alone, planned = (read_shape(path, False, file).weights for file in (None, mmproj))
    folder = read_shape(checkpoint.path, False).weights.num_parameters
    assert alone.num_parameters < planned.num_parameters == folder
    assert tiling_at(str(path)) is None
    assert tiling_at(str(path), found) == tiling_at(str(checkpoint.path))


def encoding_of(checkpoint: Checkpoint, ops: Ops) -> torch.Tensor:
    encoder = load_encoder(checkpoint, ops=ops, dtype=torch.float32, progress=lambda done, total: None)
    pixels = torch.arange(48 * 48 * 3).mul(37).remainder(256).byte().view(48, 48, 3)
    return encoder.finish(encoder.layers(encoder.begin(pixels), 0, encoder.num_layers))


def test_encoder_file_without_a_weight_is_refused_when_loaded(
    made: Callable[[str], Made], native: Ops, tmp_path: Path
) -> None:
    oracle, checkpoint = made("smolvlm")
    path = write_language_model(tmp_path / "model.gguf", checkpoint)
    mmproj = write_mmproj(tmp_path / "mmproj.gguf", oracle, without="v.post_ln.bias")
    with pytest.raises(
        ModelError, match=r"mmproj\.gguf: 1 weights are missing: model\.vision_model\.post_layernorm\.bias"
    ):
        encoding_of(open_checkpoint(path, mmproj=mmproj), native)
