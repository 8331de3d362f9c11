from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.integration.rig import Rig
from tests.kernels import NATIVE
from tests.models.tiny import shared_tiny


@pytest.fixture(scope="package", autouse=True)
def torch_threads_as_before() -> Iterator[None]:
    """A runner sets them for the process it runs in."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Path:
    return shared_tiny("llama").path


@pytest.fixture(scope="module")
def embedded_rig(embedded_model: Path) -> Rig:
    return Rig(embedded_model, dtype=torch.bfloat16, kernels=NATIVE, num_threads=2, context_length=512)
