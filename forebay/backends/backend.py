"""The declaration of a kernel backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

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


class OpsOptions(NamedTuple):
    """Settings of the kernels of a backend. `memory`: for packed weights; None: torch's. `exact`: a row's bits may not
    depend on the other rows. `fp8_inputs`: inputs of weights in FP8 are rounded to FP8. `most_rows`: tokens of
    prompts in one step, up to which products are compared at a start. `of_ranks`: weights are parts of whole ones, and
    outputs have the bits that they have in a product of the whole."""

    num_threads: int
    activation_bits: int = 16
    memory: WeightMemory | None = None
    exact: bool = True
    fp8_inputs: bool = False
    most_rows: int = 2048
    of_ranks: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Backend:
    """One value of `--kernels`.

    `make` raises ConfigError if the machine lacks a thing that the backend needs; `make_ops` has checked the GPU of the
    device "cuda". `fit` is None for a backend that is never the default. Of the others the one with the lowest `order`
    that suits the machine is the default. `rounds_inputs`: inputs of weights in codes are rounded to `activation_bits`.
    `widens_bfloat16`: matrices stay in bfloat16 if the model computes in float32. `uses_codes`: weights in codes are
    faster than the same weights unpacked. `chunked_scans`: slots of states have the inputs of an open chunk, too
    (`base.scan_rows`). `resolve` returns the name of the backend that this one stands for on a CPU.
    """

    name: str
    about: str
    make: Callable[[OpsOptions], Ops]
    device: str = "cpu"
    order: int = 0
    fit: Callable[[Here], Fit] | None = None
    rounds_inputs: bool = False
    widens_bfloat16: bool = False
    uses_codes: bool = True
    chunked_scans: bool = False
    resolve: Callable[[Cpu], str] | None = None

    def on(self, cpu: Cpu) -> str:
        """Return the name of the kernels that run on `cpu`."""
        return self.name if self.resolve is None else self.resolve(cpu)


LEAST_CAPABILITY: Final = (8, 0)  # the first matrix units that take bfloat16


def require_gpu() -> None:
    """Raise ConfigError if torch cannot use an NVIDIA GPU that suits, before a backend of the device "cuda" is made."""
    import torch

    if torch.version.cuda is None:
        raise ConfigError(
            f"there is no NVIDIA GPU that this torch ({torch.__version__}) can use, since it is not built for CUDA: "
            "install its build for CUDA, or use --device cpu"
        )
    if not torch.cuda.is_available():
        raise ConfigError(
            f"there is no NVIDIA GPU that this torch ({torch.__version__} for CUDA {torch.version.cuda}) can use"
            f"{_why_no_gpu()}: install a newer driver or a torch for an older CUDA, or use --device cpu"
        )
    capability = torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        raise ConfigError(
            f"{torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}, and these kernels "
            f"need {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]}: use a newer GPU, or --device cpu"
        )


def _why_no_gpu() -> str:
    """Return the driver's own words, as torch quotes them, or nothing."""
    import torch

    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return f" ({str(error).partition('. ')[0].strip()})"
    return ""
