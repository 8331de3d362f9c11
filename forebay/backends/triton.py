"""Triton kernels, for tensors on an NVIDIA GPU. CUDA builds of torch bring Triton along."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forebay.backends.backend import Backend, Fit, Here, OpsOptions
from forebay.base.errors import ConfigError
from forebay.base.paths import cache_folder

if TYPE_CHECKING:
    from forebay.ops.interface import Ops


# Without a workspace cuBLASLt has no kernel that divides a sum between programs, which it would do by the number of
# rows. Both are read when CUDA starts. A value that the user has set stays.
_NO_WORKSPACE: Final = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}

_FP8_CAPABILITY: Final = (8, 9)  # the first matrix units that multiply FP8
_DRIVER: Final = Path("/proc/driver/nvidia/version")


def _fit(here: Here) -> Fit:
    return Fit(here.has_gpu, "those for GPUs" if here.has_gpu else "")


def _make(options: OpsOptions) -> Ops:
    import torch

    try:
        from forebay.ops.triton import TritonOps
        from forebay.ops.triton.choices import ALL_ROWS, Choice, Choices
        from forebay.ops.triton.linear import probe, probe_times
    except ImportError as error:
        raise ConfigError(
            f"the GPU's kernels need Triton, which cannot be imported ({error}): use pip to install it"
        ) from None
    machine = _machine()
    try_compiler(machine)
    fp8_inputs, memory = options.fp8_inputs, options.memory
    if fp8_inputs and (capability := torch.cuda.get_device_capability()) < _FP8_CAPABILITY:
        raise ConfigError(
            f"--activation-dtype fp8: {torch.cuda.get_device_name()} has compute capability {capability[0]}."
            f"{capability[1]}, and FP8 needs {_FP8_CAPABILITY[0]}.{_FP8_CAPABILITY[1]}: leave it out"
        )
    file, most_rows = cache_folder("products") / "choices.json", options.most_rows
    tried = f"{machine}, {most_rows:,} rows"
    if not options.exact:
        choices = Choices(partial(probe_times, most_rows=most_rows), file, f"{tried}, any bits")
        return TritonOps("cuda", options.num_threads, choices, memory, fp8_inputs=fp8_inputs)
    for name, value in _NO_WORKSPACE.items():
        os.environ.setdefault(name, value)
    torch.backends.cuda.preferred_blas_library("cublaslt")
    choices = Choices(partial(probe, most_rows=most_rows), file, tried)
    if options.of_ranks:
        own = Choice(ALL_ROWS, "cuBLASLt's bits may depend on the number of outputs, which ranks divide")
        choices = Choices(lambda weight: own)
    return TritonOps("cuda", options.num_threads, choices, memory, fp8_inputs=fp8_inputs)


def try_compiler(machine: str, device: str = "cuda") -> None:
    """Compile the smallest kernel, before weights are read. Raises ConfigError if Triton compiles nothing here; of a
    kernel that alone does not compile, torch computes the op."""
    import torch

    from forebay.ops.triton.launch import NotCompiled
    from forebay.ops.triton.steps import smallest_kernel

    numbers = torch.zeros(2, dtype=torch.int32, device=device)
    try:
        smallest_kernel.compile(numbers.long(), numbers, numbers)
    except NotCompiled as error:
        raise ConfigError(
            f"Triton compiles no kernel for {machine} ({error}): install a C compiler (gcc) if it found none, else a "
            "torch and its Triton that are made for this GPU and driver, or use --device cpu"
        ) from None


def _machine() -> str:
    """Return the parts of a machine on which bits and times of products depend."""
    import torch
    import triton

    try:
        driver = _DRIVER.read_text().partition("\n")[0]
    except OSError:
        driver = "unknown driver"
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    return f"{name} {capability}, {driver}, torch {torch.__version__}, Triton {triton.__version__}"


BACKENDS: Final = (
    Backend(name="triton", about="for NVIDIA GPUs", make=_make, device="cuda", order=1, fit=_fit, chunked_scans=True),
)
