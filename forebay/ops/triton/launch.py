"""Launches of kernels: compiled at the first call of each variant, then bound to it.

Triton's own dispatch reads its settings from the environment, parses options and describes 30 to 45 arguments in each
launch. On an H100 this took 40 us of the host for each kernel of a step without a graph. `Kernel` keeps the compiled
variants by a key of its own, which differs wherever Triton would compile another variant.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, Final

from torch import Tensor
from triton.runtime import driver

from forebay.base.heap import is_out_of_memory
from forebay.ops.triton.common import INTERPRETED

_ALIGNED: Final = 16  # Triton compiles wider loads for addresses and sizes that this divides
_INT32: Final = 1 << 31


class NotCompiled(Exception):
    """A kernel that Triton cannot compile for this GPU, or that the GPU cannot load. It was not launched."""


class Kernel:
    """A function that Triton compiles, launched as `kernel[grid](*arguments, **constants)`.

    Arguments are given in order and constants by name, always in the same order. The process uses one GPU. An op
    launches the kernel that writes its arguments last, so that a `NotCompiled` leaves them as they were.
    """

    def __init__(self, jit: Any) -> None:
        self.jit = jit
        self._variants: dict[Hashable, Callable[..., None]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        """Return what launches the kernel over the grid."""
        if INTERPRETED:
            return self.jit[grid]
        return functools.partial(self._launch, (*grid, 1, 1)[:3])

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile a variant without a launch."""
        self._compiled(args, options)

    def require(self, *args: Any, **options: Any) -> None:
        """Raise NotCompiled unless a launch of these arguments is possible: for an op whose kernels before write."""
        if not INTERPRETED:
            self._variant(args, options)

    def _variant(self, args: tuple[Any, ...], options: dict[str, Any]) -> Callable[..., None]:
        key = variant_key(args, options)
        run = self._variants.get(key)
        if run is None:
            run = self._variants[key] = self._bound(args, options)
        return run

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        run = self._variant(args, options)
        device = driver.active.get_current_device()
        run(*grid, driver.active.get_current_stream(device), args)

    def _bound(self, args: tuple[Any, ...], options: dict[str, Any]) -> Callable[..., None]:
        """Compile a variant and return its launcher, of a grid, a stream and arguments."""
        constants = self._constants(len(args), options)
        variant = self._compiled(args, options)
        start, function, metadata = variant.run, variant.function, variant.packed_metadata

        def run(x: int, y: int, z: int, stream: int, args: tuple[Any, ...]) -> None:
            start(x, y, z, stream, function, metadata, None, None, None, *args, *constants)

        return run

    def _constants(self, num_args: int, options: dict[str, Any]) -> tuple[Any, ...]:
        """The values of the parameters behind the arguments: the key has arguments by kind, constants by value."""
        given, named = self.jit.params[:num_args], self.jit.params[num_args:]
        assert not any(param.is_constexpr for param in given), f"{self.jit.fn.__name__}: a constant without its name"
        assert all(param.is_constexpr for param in named), f"{self.jit.fn.__name__}: an argument by its name"
        return tuple(options[param.name] for param in named)

    def _compiled(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        try:
            variant = self.jit.warmup(*args, grid=(1,), **options)
            assert variant.run is not None  # loads it
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise NotCompiled(f"{self.jit.fn.__name__}: {_in_one_line(error)}") from error
        return variant


def kernel(jit: Any) -> Kernel:
    """Decorate a function that Triton compiles and ops launch."""
    return Kernel(jit)


def variant_key(args: tuple[Any, ...], options: dict[str, Any]) -> Hashable:
    """Return a key that differs between calls for which Triton compiles different variants."""
    return (*map(_kind, args), *options.values())


def _kind(value: Any) -> object:
    """Return what of an argument Triton compiles for."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % _ALIGNED
    if type(value) is int:
        return 1 if value == 1 else (value % _ALIGNED == 0, -_INT32 <= value < _INT32)
    return type(value)


def _in_one_line(error: Exception) -> str:
    """Return the first line that says something; Triton's own errors begin with a place in the source."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no reason given'}"
