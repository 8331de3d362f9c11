"""C25: new weights of a GPU take the places of the old ones, where its kernels read them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from forebay import models
from forebay.families.checkpoint import open_checkpoint
from forebay.formats.quantization import Quantization
from forebay.ops.weight_memory import WeightMemory
from tests.engine.test_sleep import other_weights
from tests.models.drive import Driver
from tests.models.tiny import make_oracle, random_ids, shared_tiny
from tests.ops.helpers import assert_same_bits
from tests.ops.triton_device import INTERPRETER_ALONE, TritonOps

# Dense and in codes; experts; heads of latent attention; states.
CASES = [
    ("llama", Quantization.INT4),
    *(
        pytest.param(case, Quantization.NONE, marks=pytest.mark.slow)
        for case in ("llama", "gpt_oss", "deepseek_v3", "falcon_h1")
    ),
]


def folder_of(case: str, quantization: Quantization, tmp_path: Path) -> Path:
    if quantization is Quantization.NONE:
        return shared_tiny(case).path
    oracle = make_oracle(case, num_hidden_layers=1, hidden_size=64, head_dim=16, intermediate_size=64)
    oracle.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@INTERPRETER_ALONE
@pytest.mark.parametrize(("case", "quantization"), CASES)
def test_c25_weights_loaded_again_are_those_that_kernels_of_a_gpu_read(
    case: str, quantization: Quantization, tmp_path: Path
) -> None:
    ids, folder = random_ids(5, seed=1), folder_of(case, quantization, tmp_path)
    other = other_weights(folder, tmp_path / "other")
    memory = WeightMemory(partial(torch.empty, dtype=torch.uint8))

    def load(path: Path, memory: WeightMemory | None) -> models.Model:
        ops = TritonOps("cpu", 1, memory=memory)
        return models.load(open_checkpoint(path), ops=ops, dtype=torch.float32, quantization=quantization)

    def logits(model: models.Model) -> torch.Tensor:
        return Driver(model, chunked_scans=True).step([(1, ids)])[0]

    model = load(folder, memory)
    before = logits(model)
    with torch.inference_mode(), memory.again():
        load(other, memory)
    after = logits(model)
    assert not torch.equal(after, before)
    assert_same_bits(after, logits(load(other, None)))
