from __future__ import annotations

import pytest
import torch

from forebay.ops.interface import Ops
from forebay.ops.native.ops import NativeOps
from tests.kernels import named, native_ops, variants_in


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    variants = variants_in(metafunc.module.__name__)
    for fixture, params in (("native", variants), ("each_ops", [*variants, None])):
        if fixture in metafunc.fixturenames:
            ids = ["torch" if variant is None else variant.name for variant in params]
            metafunc.parametrize(fixture, params, ids=ids, indirect=True, scope="session")


@pytest.fixture(scope="session")
def native(request: pytest.FixtureRequest) -> NativeOps:
    return native_ops(request.param, 2)


@pytest.fixture(scope="session")
def single_threaded(native: NativeOps) -> NativeOps:
    return native_ops(named(native.name), 1)


@pytest.fixture
def reference(native: NativeOps) -> Ops:
    """Rounds as the native ops do, those of a module of its own too."""
    return Ops(1, native.activation_bits)


@pytest.fixture(scope="session")
def each_ops(request: pytest.FixtureRequest) -> Ops:
    """The reference too, for what must hold of it by itself."""
    return Ops(1) if request.param is None else native_ops(request.param, 2)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen
