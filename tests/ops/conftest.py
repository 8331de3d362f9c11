from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from forebay.base.variants import usable_variants
from forebay.ops.compiler import library
from forebay.ops.interface import Ops
from forebay.ops.native import NativeOps
from forebay.ops.reference import TorchOps

VARIANTS = usable_variants()


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """Small tensors: torch's threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", params=VARIANTS, ids=[variant.name for variant in VARIANTS])
def native(request: pytest.FixtureRequest) -> NativeOps:
    """Every instruction set this machine has, not only the best: the others are other people's machines."""
    return NativeOps(library(request.param), request.param.name, 2)


@pytest.fixture(scope="session")
def single_threaded(native: NativeOps) -> NativeOps:
    variant = next(v for v in VARIANTS if native.name == f"native-{v.name}")
    return NativeOps(library(variant), variant.name, 1)


@pytest.fixture(scope="session")
def reference() -> TorchOps:
    return TorchOps(1)


@pytest.fixture(scope="session", params=[*VARIANTS, None], ids=[*(variant.name for variant in VARIANTS), "torch"])
def each_ops(request: pytest.FixtureRequest) -> Ops:
    """The reference too, for what must hold of it by itself."""
    return TorchOps(1) if request.param is None else NativeOps(library(request.param), request.param.name, 2)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param
