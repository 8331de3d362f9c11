"""Weights that cross to a GPU through pinned buffers are those that were sent, however late the GPU is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from forebay import models
from forebay.backends import make_ops
from forebay.families.checkpoint import open_checkpoint
from forebay.models import loader
from forebay.ops.uploads import Uploads
from tests.models.drive import Driver
from tests.models.tiny import random_ids, shared_tiny
from tests.ops.helpers import assert_same_bits, normal
from tests.pools.fake_streams import fake_gpu

DEVICE = torch.device("cpu")


def convert(source: torch.Tensor, target: torch.Tensor) -> bool:
    target.copy_(source)
    return bool(target.isfinite().all())


@pytest.mark.parametrize("count", [0, 1, 8, 9, 40])
def test_uploads_convert_and_copy_in_parts_of_a_buffer(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source = normal((count,), torch.float32, seed=1)
    with fake_gpu(monkeypatch) as gpu:
        uploads = Uploads(DEVICE, buffer_bytes=16)
        target = torch.empty(count, dtype=torch.bfloat16)
        assert uploads.send(gpu.on_host(source), target, convert)
        again = uploads.array(np.arange(count))
    assert_same_bits(target, source.bfloat16())
    assert again.tolist() == [*range(count)]


def test_uploads_tell_of_any_part_that_may_not_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    source = torch.zeros(20)
    source[3] = torch.nan
    with fake_gpu(monkeypatch) as gpu:
        assert not Uploads(DEVICE, buffer_bytes=16).send(gpu.on_host(source), torch.empty(20), convert)


def test_uploads_of_a_model_give_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, ids = open_checkpoint(shared_tiny("llama").path), random_ids(9, seed=1)
    ops, found = make_ops("torch", 1), []
    for uploads in (None, Uploads(DEVICE, buffer_bytes=4096)):
        with monkeypatch.context() as patch, fake_gpu(patch):
            patch.setattr(loader.Uploads, "to", lambda device, made=uploads: made)
            model = models.load(checkpoint, ops=ops, dtype=torch.float32)
        found += Driver(model).step([(1, ids)])
    assert_same_bits(*found)
