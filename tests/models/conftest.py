from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from forebay import models
from forebay.backends import make_ops
from forebay.families.checkpoint import open_checkpoint
from forebay.models import Model
from forebay.ops import Ops
from tests.kernels import NATIVE
from tests.models.tiny import Tiny, shared_tiny

LoadModel = Callable[[Path], Model]


@functools.cache
def _made(backend: str) -> Ops:
    ops = make_ops(backend, 2)
    if backend != "torch" and ops.name == "torch":
        pytest.skip("no native ops on this machine")
    return ops


@pytest.fixture(params=["torch", NATIVE])
def ops(request: pytest.FixtureRequest) -> Ops:
    """Made once. The fixture is of each test, so that the two cases of a checkpoint follow each other in one process,
    which makes the checkpoint once."""
    return _made(request.param)


@pytest.fixture(scope="session")
def native() -> Ops:
    """What gives the same bits whatever the steps."""
    return _made(NATIVE)


@pytest.fixture(scope="session")
def tiny() -> Callable[[str], Tiny]:
    """The checkpoint of a case, made once."""
    return shared_tiny


@pytest.fixture
def load(ops: Ops) -> LoadModel:
    def load_float32(path: Path) -> Model:
        model = models.load(open_checkpoint(path), ops=ops, dtype=torch.float32)
        assert isinstance(model, Model), "a decoder"
        return model

    return load_float32
