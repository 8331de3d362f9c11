"""Launches of Triton's kernels: which variant, what is launched, and ops whose kernel does not compile."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forebay.backends.triton import try_compiler
from forebay.base.errors import ConfigError
from forebay.ops.interface import Ops
from forebay.ops.reference.recurrence import Convolution
from tests.formats.coded import FORMATS, random_codes, stored
from tests.ops.chunks import SMALL, slots_of, states_of
from tests.ops.helpers import assert_same_bits, normal
from tests.ops.recurrences import state_batch

pytest.importorskip("triton", reason="Triton is not installed: scripts/bootstrap.py --dev brings it under Linux")
import triton.language as tl
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from forebay.ops.triton import launch
from forebay.ops.triton.launch import Kernel, NotCompiled, variant_key
from tests.ops.triton_compile import CompilesOnly
from tests.ops.triton_device import ALL_ROWS, Choice, Choices, TritonOps

INTS = torch.zeros(64, dtype=torch.int32)
VALUES = [INTS, INTS[1:], INTS[4:], INTS.long(), 0, 1, 2, 16, 24, 1 << 31, 1 << 40, 1.0, 2.0, True, None]


class Launches(CompilesOnly):
    """A GPU that is not there; it records what is launched, and may lack memory."""

    def __init__(self, *, threads: int = 1024, refuses: str = "") -> None:
        super().__init__(90)
        self._threads, self._refuses = threads, refuses
        self.launched: list[tuple[Any, ...]] = []

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        if self._refuses:
            raise RuntimeError(self._refuses)
        return *super().load_binary(name, binary, shared, device)[:-1], self._threads

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        return lambda *args: self.launched.append(args)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kernels are compiled instead of interpreted; `driver.set_active` gives them a GPU. No earlier run's are found."""
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(driver, "_active", None)
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path / "triton"))


def copy(x, out, n, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n, other=0), mask=at < n)


def impossible(x, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    tl.static_assert(BLOCK > 16, "no such block")
    tl.store(x, BLOCK)


def test_variant_key_differs_wherever_triton_compiles_another_variant(compiled: None) -> None:
    driver.set_active(Launches())
    binder = JITFunction(copy).create_binder()[-1]

    def of_triton(value: Any) -> str:
        return repr(binder(value, INTS, 5, BLOCK=16)[1])

    for one, other in itertools.combinations(VALUES, 2):
        differ = variant_key((one, 1), {"A": 2}) != variant_key((other, 1), {"A": 2})
        assert differ or of_triton(one) == of_triton(other), (one, other)
    assert variant_key((INTS,), {"A": 2}) != variant_key((INTS,), {"A": 3})
    assert variant_key((INTS,), {"A": 2}) == variant_key((torch.ones(5, dtype=torch.int32),), {"A": 2})


def test_kernel_launches_the_variant_of_its_arguments_without_triton_s_dispatch(
    compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[tuple[Any, ...]] = []

    def compile_variant(jit: Any, *args: Any, **options: Any) -> Any:
        variant = f"variant {len(compiled_for)}"
        compiled_for.append(args)
        return SimpleNamespace(run=lambda *args: launched.append(args), function=variant, packed_metadata=None)

    compiled_for: list[tuple[Any, ...]] = []
    monkeypatch.setattr(JITFunction, "warmup", compile_variant)
    monkeypatch.setattr(JITFunction, "run", None)
    driver.set_active(Launches())
    kernel = Kernel(JITFunction(copy))
    for grid, x, n in (((7,), INTS, 5), ((7,), INTS[1:], 5), ((3, 2), INTS[1:], 9), ((1,), INTS[16:], 9)):
        kernel[grid](x, INTS, n, BLOCK=16)
    assert [launch[:5] for launch in launched] == [
        (7, 1, 1, 0, "variant 0"),
        (7, 1, 1, 0, "variant 1"),
        (3, 2, 1, 0, "variant 1"),
        (1, 1, 1, 0, "variant 0"),
    ]
    assert [launch[9].storage_offset() for launch in launched] == [0, 1, 1, 16]
    assert [launch[11:] for launch in launched] == [(5, 16), (5, 16), (9, 16), (9, 16)]


def test_kernel_compiles_in_a_process_that_interpreted_others(compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as interpreted:
        interpreted.setattr(launch, "INTERPRETED", True)
        TritonOps("cpu", 1).norms.rms_norm(torch.ones(3, 64), torch.ones(64), 1e-5)
    gpu = Launches()
    driver.set_active(gpu)
    Kernel(JITFunction(copy))[(1,)](INTS, INTS, 5, BLOCK=16)
    assert len(gpu.launched) == 1


@pytest.mark.parametrize(
    ("body", "gpu", "reason"),
    [
        (impossible, Launches(), r"^impossible: CompileTimeAssertionFailure: no such block"),
        (copy, Launches(threads=64), r"^copy: OutOfResources: .*threads.*128.*64"),
        (copy, Launches(refuses="device kernel image is invalid"), r"^copy: RuntimeError: device kernel image"),
    ],
)
def test_kernel_that_does_not_compile_is_not_launched(compiled: None, body: Any, gpu: Launches, reason: str) -> None:
    driver.set_active(gpu)
    args = (INTS, INTS, 5) if body is copy else (INTS,)
    with pytest.raises(NotCompiled, match=reason) as raised:
        Kernel(JITFunction(body))[(1,)](*args, BLOCK=16)
    assert "\n" not in str(raised.value)
    assert not gpu.launched


def test_kernel_that_finds_no_memory_is_no_kernel_that_does_not_compile(compiled: None) -> None:
    driver.set_active(Launches(refuses="Triton Error [CUDA]: out of memory"))
    with pytest.raises(RuntimeError, match="out of memory"):
        Kernel(JITFunction(copy))[(1,)](INTS, INTS, 5, BLOCK=16)


def refuse(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let kernels of these names not compile, or all."""
    own = Kernel.__getitem__

    def chosen(kernel: Kernel, grid: Any) -> Callable[..., Any]:
        name = kernel.jit.fn.__name__
        if names and name not in names:
            return own(kernel, grid)
        return functools.partial(fail, name)

    def fail(name: str, *args: Any, **options: Any) -> None:
        raise NotCompiled(f"{name}: OutOfResources: shared memory")

    monkeypatch.setattr(Kernel, "__getitem__", chosen)


@pytest.mark.parametrize("kernel", ["_convolve", "_keep_inputs"])
def test_op_whose_kernel_does_not_compile_writes_what_its_definition_does(
    monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    ops, reference = TritonOps("cpu", 1), Ops(1)
    refuse(monkeypatch, kernel)
    conv = Convolution(normal((4, 24), torch.float32, seed=1), normal((24,), torch.float32, seed=2), silu=True)
    for seed in (3, 4):
        x, batch = normal((7, 24), torch.float32, seed=seed), state_batch([4, 3], [1, 2])
        states = [normal((4, 3, 24), torch.float32, seed=5) for _ in range(2)]
        found, expected = (
            o.recurrence.causal_conv(x, conv, s, batch) for o, s in zip((ops, reference), states, strict=True)
        )
        assert_same_bits(found, expected)
        assert_same_bits(*states)
    assert ops.fallbacks == {"recurrence.causal_conv": f"{kernel}: OutOfResources: shared memory"}
    ops.norms.rms_norm(x, x[0], 1e-5)
    assert len(ops.fallbacks) == 1


@pytest.mark.parametrize(("name", "kernel"), [("mamba2", "prepare_mamba2"), ("delta", "scan_delta")])
def test_scan_whose_kernel_does_not_compile_reads_and_writes_the_states_of_slots(
    monkeypatch: pytest.MonkeyPatch, name: str, kernel: str
) -> None:
    ops, reference, case = TritonOps("cpu", 1), Ops(1), SMALL[name]
    refuse(monkeypatch, kernel)
    inputs, batch = case.inputs(7, torch.float32, seed=3), state_batch([4, 3], [1, 2], [[(2, 3)]])
    ours = slots_of(case, 4, torch.float32, torch.float32, seed=7)
    theirs = states_of(case, ours, {}, inputs)
    assert_same_bits(case.call(ops, inputs, ours, batch), case.call(reference, inputs, theirs, batch))
    assert_same_bits(states_of(case, ours, {}, inputs), theirs)
    assert len(ops.fallbacks) == 1


@pytest.mark.parametrize("name", ["dense", "Q4_K", "MXFP4"])
def test_products_whose_kernel_does_not_compile_are_those_of_the_opened_weights(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    refuse(monkeypatch, "_product")
    ops, x = TritonOps("cpu", 1), normal((3, 256), torch.float32, seed=1)
    bias = normal((24,), torch.float32, seed=2)
    if name == "dense":
        values = normal((24, 256), torch.float32, seed=3)
        packed = replace(ops.linear.pack(values, bias), own_rows=ALL_ROWS)
    else:
        weight = random_codes(FORMATS[name], 24, 256, seed=5)
        values, packed = torch.from_numpy(weight.values()), ops.linear.pack_quantized(stored(weight), bias)
    expected = x @ values.T + bias
    torch.testing.assert_close(ops.linear.apply(x, packed), expected)
    torch.testing.assert_close(ops.linear.apply_f32(x, packed), expected)
    assert ops.fallbacks.keys() == {"linear.apply", "linear.apply_f32"}


@pytest.mark.parametrize("kernel", ["_order", "_product", "_sum_choices"])
def test_experts_whose_kernels_do_not_compile_compute_each_token_s_own_choices(
    monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    ids = torch.tensor([[2, 0], [1, 2], [0, 1]])
    x, weights = normal((3, 32), torch.float32, seed=1), torch.rand(3, 2)
    refuse(monkeypatch, kernel)
    results = []
    for ops in (TritonOps("cpu", 1), Ops(1)):
        inner, outer = (
            [ops.linear.pack(normal(shape, torch.float32, seed=seed + e)) for e in range(3)]
            for seed, shape in ((5, (48, 32)), (9, (32, 24)))
        )
        results.append(ops.experts.fused_experts(x, ops.experts.pack_experts(inner, outer), ids, weights))
    torch.testing.assert_close(*results)


def test_linear_heads_whose_kernel_does_not_compile_are_those_of_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse(monkeypatch, "_product")
    x, results = normal((5, 3, 48), torch.float32, seed=1), []
    for ops in (TritonOps("cpu", 1), Ops(1)):
        heads = ops.experts.pack_heads([ops.linear.pack(normal((40, 48), torch.float32, seed=h)) for h in range(3)])
        results.append(ops.experts.linear_heads(x, heads))
    torch.testing.assert_close(*results)


def test_probe_whose_kernel_does_not_compile_takes_cublas_and_keeps_no_choice(tmp_path: Path) -> None:
    def probe(weight: torch.Tensor) -> Choice:
        raise NotCompiled("_product: PTXASError: no such architecture")

    choices = Choices(probe, tmp_path / "choices.json", "a GPU")
    choice = choices.of(torch.zeros(9, 40))
    assert (choice.own_rows, choice.why) == (
        0,
        "Triton's kernel does not compile: _product: PTXASError: no such architecture",
    )
    assert not (tmp_path / "choices.json").exists()


def test_triton_backend_that_compiles_nothing_is_refused_in_one_line_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def compile_kernel(*args: Any) -> None:
        raise NotCompiled("_advance: RuntimeError: Failed to find C compiler.")

    monkeypatch.setattr(Kernel, "compile", compile_kernel)
    with pytest.raises(ConfigError, match=r"compiles no kernel for an H100 .*find C compiler.*: install a C compiler"):
        try_compiler("an H100", "cpu")
