"""The declaration of a kernel backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from forebay.base.cpu import Cpu
from forebay.base.errors import ConfigError

if TYPE_CHECKING:  # torch is imported where a backend is made, not where it is named
    from forebay.ops.interface import Ops
    from forebay.ops.weight_memory import WeightMemory


class Here(NamedTuple):
    """The machine, as far as the default backend depends on it: `kernel_folders` may have compiled kernels."""

    cpu: Cpu
    has_gpu: bool
    kernel_folders: tuple[Path, ...] = ()


class Fit(NamedTuple):
    """Whether a backend may be the default on a machine, and the reason."""

    suits: bool
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """One value of `--kernels`.

    `make` takes the number of threads, `activation_bits` and the memory for packed weights. It raises ConfigError if
    the machine lacks a thing that the backend needs; `make_ops` has checked the GPU of the device "cuda". `fit` is None
    for a backend that is never the default. Of the others the one with the lowest `order` that suits the machine is the
    default. `rounds_inputs`: inputs of weights in codes are rounded to `activation_bits`. `widens_bfloat16`: matrices
    stay in bfloat16 if the model computes in float32. `uses_codes`: weights in codes are faster than the same weights
    unpacked. `resolve` returns the name of the backend that this one stands for on a CPU.
    """

    name: str
    about: str
    make: Callable[[int, int, WeightMemory | None], Ops]
    device: str = "cpu"
    order: int = 0
    fit: Callable[[Here], Fit] | None = None
    rounds_inputs: bool = False
    widens_bfloat16: bool = False
    uses_codes: bool = True
    resolve: Callable[[Cpu], str] | None = None

    def on(self, cpu: Cpu) -> str:
        """Return the name of the kernels that run on `cpu`."""
        return self.name if self.resolve is None else self.resolve(cpu)


def require_gpu() -> None:
    """Raise ConfigError if torch cannot use an NVIDIA GPU, before a backend of the device "cuda" is made."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f"there is no NVIDIA GPU that this torch ({torch.__version__}) can use: install its build for CUDA and "
            "the driver, or use --device cpu"
        )
