"""Matrices that stay in the bfloat16 of their file under a model in float32: the same bits, half of the bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from forebay import models
from forebay.backends import kernels_on, make_ops
from forebay.base.cpu import this_cpu
from forebay.config.rules import value_bytes
from forebay.engine.lifecycle.model_shape import read_shape
from forebay.families.checkpoint import open_checkpoint
from forebay.formats.quantization import Quantization
from tests.kernels import NATIVE
from tests.models.drive import Driver
from tests.models.tiny import make_oracle, random_ids

# Plain, with a tied head, with experts, with heads of a latent, and with scaled weights, which are no longer bfloat16.
CASES = ("llama", "gemma3_text", "qwen3_moe", "deepseek_v32", "granitemoehybrid")


def saved(case: str, folder: Path, dtype: torch.dtype) -> Path:
    """A checkpoint whose numbers are all of bfloat16."""
    oracle = make_oracle(case)
    oracle.to(torch.bfloat16).to(dtype).save_pretrained(folder)
    return folder


def logits(model: models.Model) -> Tensor:
    return Driver(model, dtype=torch.float32).step([(1, random_ids(20, seed=0))])[0]


@pytest.mark.parametrize("kernels", ["torch", NATIVE])
@pytest.mark.parametrize("case", CASES)
def test_bfloat16_checkpoint_in_float32_has_the_logits_of_its_numbers_in_float32(
    case: str, kernels: str, tmp_path: Path
) -> None:
    ops = make_ops(kernels, 2)
    narrow, wide = (
        models.load(open_checkpoint(saved(case, tmp_path / str(dtype), dtype)), ops=ops, dtype=torch.float32)
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert torch.equal(logits(narrow), logits(wide))
    assert set(wide.held_bytes) == {"float32"}
    assert (narrow.held_bytes["bfloat16"] > 0) == ops.linear.widens_bfloat16
    if case == "llama" and ops.linear.widens_bfloat16:
        assert narrow.weight_bytes < 0.51 * wide.weight_bytes


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("told", ["bfloat16", "float32", None])
def test_plan_counts_what_is_held(case: str, told: str | None, tmp_path: Path) -> None:
    path = saved(case, tmp_path, torch.bfloat16)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["dtype"] == "bfloat16"
    (tmp_path / "config.json").write_text(json.dumps(fields | {"dtype": told}))
    kernels = kernels_on(this_cpu(), NATIVE)
    held = read_shape(path, draft_head=False).weights.held_bytes(Quantization.NONE, value_bytes("float32", kernels))
    model = models.load(open_checkpoint(path), ops=make_ops(NATIVE, 1), dtype=torch.float32)
    assert held == model.weight_bytes
