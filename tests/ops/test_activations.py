from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forebay.ops.interface import Ops
from forebay.ops.native.ops import NativeOps
from forebay.ops.reference.norms import GatedNorm
from tests.ops.helpers import assert_close, assert_same_bits, normal

pytestmark = pytest.mark.quick(16)

ROWS = [0, 1, 3, 200]
WIDTHS = [1, 16, 97, 576]
INF, NAN = float("inf"), float("nan")
GATED: dict[str, Callable[[Ops, Tensor], Tensor]] = {  # [gate | up] rows
    "silu_and_mul": lambda ops, x: ops.elementwise.silu_and_mul(x),
    "gelu_and_mul": lambda ops, x: ops.elementwise.gelu_and_mul(x),
    "gelu_and_mul-exact": lambda ops, x: ops.elementwise.gelu_and_mul(x, exact=True),
    "sparse_gelu_and_mul": lambda ops, x: ops.elementwise.sparse_gelu_and_mul(x, deviations=1.25),
    "clamped_swiglu": lambda ops, x: ops.elementwise.clamped_swiglu(x, alpha=1.702, limit=2.5),
    "mul_sigmoid": lambda ops, x: ops.elementwise.mul_sigmoid(x[:, x.shape[1] // 2 :], x[:, : x.shape[1] // 2]),
    "mul_silu": lambda ops, x: ops.elementwise.mul_silu(x[:, x.shape[1] // 2 :], x[:, : x.shape[1] // 2]),
    "mul": lambda ops, x: ops.elementwise.mul(x[:, x.shape[1] // 2 :], x[:, : x.shape[1] // 2]),
    "relu2": lambda ops, x: ops.elementwise.relu2(x),
    "xielu": lambda ops, x: ops.elementwise.xielu(x, alpha_p=0.8, alpha_n=1.3, beta=0.5, eps=-1e-6),
    "gelu": lambda ops, x: ops.elementwise.gelu(x),
    "gelu-exact": lambda ops, x: ops.elementwise.gelu(x, exact=True),
}


@pytest.fixture(params=GATED.values(), ids=GATED.keys())
def activation(request: pytest.FixtureRequest) -> Callable[[Ops, Tensor], Tensor]:
    return request.param


def test_activations_equal_the_reference(
    native: NativeOps, reference: Ops, dtype: torch.dtype, activation: Callable[[Ops, Tensor], Tensor]
) -> None:
    for rows, width in product(ROWS, WIDTHS):
        x = normal((rows, 2 * width), dtype, seed=1, scale=3)
        assert_close(activation(native, x), activation(reference, x))


def test_activations_of_views_into_wider_rows(
    each_ops: Ops, dtype: torch.dtype, activation: Callable[[Ops, Tensor], Tensor]
) -> None:
    wide = torch.full((9, 100), NAN, dtype=dtype)
    wide[:, 7:91] = normal((9, 84), dtype, seed=1)
    actual = activation(each_ops, wide[:, 7:91])
    assert actual.is_contiguous()
    assert_same_bits(actual, activation(each_ops, wide[:, 7:91].contiguous()))


def test_activations_depend_neither_on_other_rows_nor_threads_nor_the_place_in_a_row(
    native: NativeOps, single_threaded: NativeOps, dtype: torch.dtype, activation: Callable[[Ops, Tensor], Tensor]
) -> None:
    x = normal((200, 2 * 576), dtype, seed=1)
    together = activation(native, x)
    assert_same_bits(activation(single_threaded, x), together)
    assert_same_bits(activation(native, x[17:18]), together[17:18])
    same = activation(native, normal((50, 1), dtype, seed=2).repeat(1, 2 * 37))  # 37: vectors, and a part of one
    assert_same_bits(same, same[:, :1].expand_as(same))


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul", "gelu_and_mul-exact"])
def test_activations_at_the_ends_of_the_range(native: NativeOps, reference: Ops, dtype: torch.dtype, name: str) -> None:
    gate = torch.tensor([[-1e30, -200.0, -104.0, -90.0, -1e-30, 0.0, 1e-30, 60.0, 90.0, 200.0, 1e30, INF, NAN]])
    if name == "gelu_and_mul-exact":
        gate = gate.clamp(max=1e30)  # of infinity torch makes NaN
    x = torch.cat([gate, torch.ones_like(gate)], dim=1).to(dtype)
    actual, expected = GATED[name](native, x), GATED[name](reference, x)
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-35, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "exact", "tolerance"),
    [
        ("silu_and_mul", F.silu, 3e-7),
        ("mul_sigmoid", torch.sigmoid, 3e-7),
        ("gelu_and_mul", lambda x: F.gelu(x, approximate="tanh"), 3e-6),  # 17 in the exponent has an ulp of 2e-6
        ("gelu_and_mul-exact", F.gelu, 3e-6),
    ],
)
def test_activations_are_close_to_float64(
    native: NativeOps, name: str, exact: Callable[[Tensor], Tensor], tolerance: float
) -> None:
    gate = normal((1, 100_003), torch.float32, seed=1, scale=4).clamp(-5, 80)
    actual = GATED[name](native, torch.cat([gate, torch.ones_like(gate)], dim=1)).double()
    expected = exact(gate.double())
    assert ((actual - expected).abs() <= tolerance * expected.abs()).all()


@pytest.mark.parametrize("eps", [-0.3, -1e-6, 0.2])
def test_xielu_is_close_to_float64_on_both_sides_of_zero(native: NativeOps, eps: float) -> None:
    x = torch.cat([normal((1, 50_001), torch.float32, seed=1, scale=scale) for scale in (1e-4, 0.3, 6)], dim=1)
    given = {"alpha_p": 0.8, "alpha_n": 1.3, "beta": 0.5, "eps": eps}
    actual = native.elementwise.xielu(x, **given).double()
    exact = x.double()
    below = 1.3 * (torch.expm1(exact.clamp(max=eps)) - exact)
    expected = 0.5 * exact + torch.where(exact > 0, 0.8 * exact.square(), below)
    assert ((actual - expected).abs() <= 4e-7 * (expected.abs() + exact.abs() + abs(eps))).all()


def test_xielu_of_what_is_not_finite_is_that_of_the_reference(native: NativeOps, reference: Ops) -> None:
    x = torch.tensor([[INF, NAN, -1e30, 0.0, -0.0, -200.0]])
    torch.testing.assert_close(*(GATED["xielu"](ops, x) for ops in (native, reference)), equal_nan=True)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_gated_rms_norm_equals_the_reference(
    native: NativeOps, reference: Ops, dtype: torch.dtype, norm_first: bool, sigmoid: bool, shared: bool
) -> None:
    for rows, (groups, group_size) in product(ROWS, [(1, 576), (4, 64), (3, 97), (5, 1), (16, 16)]):
        width = groups * group_size
        wide = normal((rows, 2 * width + 5), dtype, seed=1)
        x, gate = wide[:, 3 : 3 + width], wide[:, 5 + width :]
        weight = normal((group_size if shared else width,), dtype, seed=2)
        norm = GatedNorm(weight, 1e-5, group_size, norm_first, sigmoid)
        assert_close(native.norms.gated_rms_norm(x, gate, norm), reference.norms.gated_rms_norm(x, gate, norm))


def test_gated_rms_norm_depends_neither_on_other_rows_nor_threads(
    native: NativeOps, single_threaded: NativeOps, dtype: torch.dtype
) -> None:
    x, gate, weight = (normal((n, 512), dtype, seed=n) for n in (200, 200, 1))

    def norm(ops: Ops, rows: slice) -> Tensor:
        return ops.norms.gated_rms_norm(
            x[rows], gate[rows], GatedNorm(weight[0], 1e-5, group_size=128, norm_first=False)
        )

    together = norm(native, slice(None))
    assert_same_bits(norm(single_threaded, slice(None)), together)
    assert_same_bits(norm(native, slice(17, 18)), together[17:18])
