from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.rig import Rig
from tests.kernels import NATIVE
from tests.models.tiny import shared_tiny


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Path:
    return shared_tiny("llama").path


@pytest.fixture(scope="module")
def embedded_rig(embedded_model: Path) -> Rig:
    return Rig(embedded_model, dtype=torch.bfloat16, kernels=NATIVE, num_threads=2, context_length=512)
