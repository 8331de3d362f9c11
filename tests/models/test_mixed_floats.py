"""DeepSeek-V4's published files, in FP8 and FP4: the values of their codes, and a model of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forebay import models
from forebay.backends import make_ops
from forebay.base.errors import ModelError
from forebay.families.checkpoint import open_checkpoint
from forebay.formats.quantization import Quantization
from forebay.formats.small_floats import E2M1
from forebay.formats.stored_tensor import read_tensor
from tests.kernels import NATIVE
from tests.models.drive import Driver
from tests.models.heads import make_headed
from tests.models.tiny import random_ids

PUBLISHED = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}
SIZES = {
    "hidden_size": 160,
    "head_dim": 32,
    "q_lora_rank": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "o_lora_rank": 32,
}
WIDE = re.compile(
    r"\.attn\.(wq_a|wq_b|wkv|wo_a|wo_b)\.weight|\.attn\.indexer\.wq_b\.weight|\.shared_experts\.w\d\.weight"
    r"|\.[eh]_proj\.weight"
)
EXPERT = re.compile(r"\.experts\.\d+\.w\d\.weight")


def power_above(values: Tensor) -> Tensor:
    return torch.exp2(values.clamp(min=2.0**-20).log2().ceil())


def wide(weight: Tensor, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    """The parts of a matrix in FP8 with a scale for each block of 128 by 128, and their values."""
    outputs, inputs = weight.shape
    rows, columns = -(-outputs // 128), -(-inputs // 128)
    blocks = torch.zeros(128 * rows, 128 * columns)
    blocks[:outputs, :inputs] = weight.abs()
    scale = power_above(blocks.view(rows, 128, columns, 128).amax((1, 3)) / 448)
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:outputs, :inputs]
    codes = (weight / spread).to(torch.float8_e4m3fn)
    return {"weight": codes, "scale": scale.to(dtype)}, codes.float() * spread


def narrow(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The parts of a matrix in FP4 with a power of two for 32 inputs, and their values."""
    levels, groups = torch.from_numpy(E2M1), weight.view(len(weight), -1, 32)
    scale = power_above(groups.abs().amax(-1) / 6)
    codes = ((groups / scale.unsqueeze(-1)).unsqueeze(-1) - levels).abs().argmin(-1)
    values = (levels[codes] * scale.unsqueeze(-1)).view(weight.shape)
    flat = codes.view(len(weight), -1, 2)
    pairs = (flat[..., 0] | flat[..., 1] << 4).to(torch.uint8).view(torch.int8)
    return {"weight": pairs, "scale": scale.to(torch.float8_e8m0fnu)}, values


def publish(folder: Path, experts: str) -> tuple[Path, Path]:
    """The same values in files as published, and in float32."""
    make_headed("deepseek_v4", folder / "plain", **SIZES)
    fields = json.loads((folder / "plain" / "config.json").read_text())
    tensors, coded = load_file(folder / "plain" / "model.safetensors"), {}
    for name, weight in list(tensors.items()):
        if EXPERT.search(name) and experts == "fp4":
            parts, tensors[name] = narrow(weight)
        elif WIDE.search(name) or EXPERT.search(name):
            parts, tensors[name] = wide(weight, torch.float8_e8m0fnu if experts == "fp4" else torch.float32)
        else:
            parts = {"weight": weight} if name.endswith(".weight") else {"": weight}
        name = name.replace(".attn.norm.", ".attn.kv_norm.")  # transformers saves it as the compressors' norms
        stem = name.removesuffix(".weight")
        coded |= {f"{stem}.{part}" if part else name: value.contiguous() for part, value in parts.items()}
    save_file(tensors, folder / "plain" / "model.safetensors")
    (folder / "coded").mkdir()
    save_file(coded, folder / "coded" / "model.safetensors")
    fields |= {"quantization_config": PUBLISHED, "expert_dtype": experts}
    (folder / "coded" / "config.json").write_text(json.dumps(fields))
    return folder / "coded", folder / "plain"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    return {experts: publish(tmp_path_factory.mktemp(experts), experts) for experts in ("fp4", "fp8")}


@pytest.mark.parametrize("draft_head", [False, True])
@pytest.mark.parametrize("experts", ["fp4", "fp8"])
def test_published_v4_files_have_the_values_of_their_codes_to_the_bit(
    experts: str, draft_head: bool, published: Any
) -> None:
    ours, theirs = (open_checkpoint(path, draft_head=draft_head) for path in published[experts])
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert ours.config.unknown_options == ()
    coded = 0
    for name, tensor in ours.tensors.items():
        expected = theirs.tensors[name]
        assert (read_tensor(tensor) == read_tensor(expected)).all(), name
        coded += "fp8" in tensor.storage
        planned = ours.config.packing.format(name, tensor.shape[-1])
        assert (planned is None) == (tensor.codes is None), name
        assert planned is None or planned == tensor.codes.sources[0].format, name
    num_layers = 4 + draft_head
    # Experts, attention and shared experts, indexers, and what the head joins.
    assert coded == num_layers * (6 * 3 + 5 + 3) + 2 + 2 * draft_head


@pytest.mark.parametrize("experts", ["fp4", pytest.param("fp8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", ["torch", pytest.param(NATIVE, marks=pytest.mark.slow)])
def test_published_v4_files_give_the_logits_of_their_values(experts: str, backend: str, published: Any) -> None:
    coded, plain = published[experts]
    ids, ops = random_ids(20, seed=0), make_ops(backend, 2)
    got, expected = (
        Driver(models.load(open_checkpoint(path), ops=ops, dtype=torch.float32, quantization=form)).step([(1, ids)])[0]
        for path, form in ((coded, Quantization.FILE), (plain, Quantization.NONE))
    )
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=5e-3 if backend == NATIVE else 2e-4)


@pytest.mark.parametrize(
    ("stem", "change", "message"),
    [
        ("layers.0.attn.wq_a", lambda parts: {"weight": parts["weight"]}, "are not the parts"),
        ("layers.0.attn.wq_a", lambda parts: parts | {"scale": parts["scale"].repeat(2, 1)}, "are not the parts"),
        ("layers.0.ffn.experts.0.w1", lambda parts: parts | {"scale": parts["scale"][:, :1]}, "are not the parts"),
        ("layers.0.ffn.experts.0.w1", lambda parts: {"scale": parts["scale"]}, "are not the parts"),
    ],
)
def test_parts_of_published_v4_layers_that_do_not_go_together_are_refused(
    stem: str, change: Any, message: str, published: Any, tmp_path: Path
) -> None:
    coded, _ = published["fp4"]
    tensors = load_file(coded / "model.safetensors")
    (stem,) = {name.rpartition(".")[0] for name in tensors if name.endswith(f"{stem}.weight")}
    parts = {part: tensors.pop(f"{stem}.{part}") for part in ("weight", "scale")}
    tensors |= {f"{stem}.{part}": value.contiguous() for part, value in change(parts).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((coded / "config.json").read_text())
    with pytest.raises(ModelError, match=message):
        open_checkpoint(tmp_path)
