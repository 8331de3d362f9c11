"""The kernel backends: a file each, which declares them as `BACKENDS`.

A new file is found by its place, and its backends are values of `--kernels`. The declarations need no torch: command
line and configuration read them. `make_ops` makes the kernels of one.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Final

from forebay.backends.backend import Backend, Here, OpsOptions, require_gpu
from forebay.base.cpu import Cpu
from forebay.base.errors import ConfigError

if TYPE_CHECKING:
    from forebay.ops.interface import Ops
    from forebay.ops.weight_memory import WeightMemory

_MODULES: Final = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != "backend")
_FOUND: Final = [
    backend
    for name in _MODULES
    for backend in importlib.import_module(f"{__name__}.{name}").BACKENDS  # which each of them declares
]
BACKENDS: Final[dict[str, Backend]] = {
    backend.name: backend for backend in sorted(_FOUND, key=lambda backend: backend.order)
}


def kernels_by_description() -> dict[str, list[str]]:
    """Return the names of the backends by what they are."""
    names: dict[str, list[str]] = {}
    for backend in BACKENDS.values():
        names.setdefault(backend.about, []).append(backend.name)
    return names


def kernels_on(cpu: Cpu, backend: str) -> Backend:
    """Return the backend of the kernels that run on `cpu` where `backend` is asked for."""
    return BACKENDS[BACKENDS[backend].on(cpu)]


def default_backend(here: Here) -> tuple[str, str]:
    """Return the name of the first backend that suits the machine, and the reason: its own, or why the one before it
    does not suit."""
    missing = ""
    for backend in BACKENDS.values():
        if backend.fit is None:
            continue
        suits, why = backend.fit(here)
        missing = why or missing
        if suits:
            return backend.name, missing
    raise ConfigError("no kernel backend suits this machine: name one with --kernels")


def make_ops(
    backend: str,
    num_threads: int,
    activation_bits: int = 16,
    memory: WeightMemory | None = None,
    *,
    exact: bool = True,
    fp8_inputs: bool = False,
    most_rows: int = 2048,
    of_ranks: bool = False,
) -> Ops:
    """Return the kernels of `backend` on `num_threads` threads.

    Raises ConfigError if there is no such backend, it needs a GPU and there is none, or it cannot be made here for
    another reason. The others are those of `OpsOptions`.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"kernel backend {backend!r}: use one of {', '.join(BACKENDS)}")
    if num_threads < 1:
        raise ConfigError(f"{num_threads} threads: use at least 1")
    chosen = BACKENDS[backend]
    if chosen.device == "cuda":
        require_gpu()
    return chosen.make(OpsOptions(num_threads, activation_bits, memory, exact, fp8_inputs, most_rows, of_ranks))
