from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from forebay.ops import Ops, make_ops
from tests.kernels import NATIVE


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """Small tensors: torch's threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", params=[NATIVE, "torch"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return made(request.param)


@pytest.fixture(scope="session")
def native_ops() -> Ops:
    """What promises equal bits whatever the batch, and reads nothing back from the device."""
    return made(NATIVE)


def made(backend: str) -> Ops:
    ops = make_ops(backend, 2)
    if backend != "torch" and ops.name == "torch":
        pytest.skip("no native ops on this machine")
    return ops
