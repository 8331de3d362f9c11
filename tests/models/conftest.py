from __future__ import annotations

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


def _made(backend: str) -> Ops:
    ops = make_ops(backend, 2)
    if backend != "torch" and ops.name == "torch":
        pytest.skip("no native ops on this machine")
    return ops


@pytest.fixture(scope="session", params=["torch", NATIVE])
def ops(request: pytest.FixtureRequest) -> Ops:
    return _made(request.param)


@pytest.fixture(scope="session")
def native() -> Ops:
    """What gives the same bits whatever the steps."""
    return _made(NATIVE)


@pytest.fixture(scope="session")
def tiny() -> Callable[[str], Tiny]:
    """The checkpoint of a case, made once."""
    return shared_tiny


@pytest.fixture(scope="session")
def load(ops: Ops) -> LoadModel:
    def load_float32(path: Path) -> Model:
        return models.load(open_checkpoint(path), ops=ops, dtype=torch.float32)

    return load_float32
