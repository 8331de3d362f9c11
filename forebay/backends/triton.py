"""Triton kernels, for tensors on an NVIDIA GPU. CUDA builds of torch bring Triton along."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from forebay.backends.backend import Backend, Fit, Here
from forebay.base.errors import ConfigError

if TYPE_CHECKING:
    from forebay.ops.interface import Ops
    from forebay.ops.weight_memory import WeightMemory


# Without a workspace cuBLASLt has no kernel that divides a sum between programs, which it would do by the number of
# rows. Both are read when CUDA starts. A value that the user has set stays.
_NO_WORKSPACE: Final = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}


def _fit(here: Here) -> Fit:
    return Fit(here.has_gpu, "those for GPUs" if here.has_gpu else "")


def _make(num_threads: int, activation_bits: int, memory: WeightMemory | None) -> Ops:
    import torch

    try:
        from forebay.ops.triton import TritonOps
    except ImportError as error:
        raise ConfigError(
            f"the GPU's kernels need Triton, which cannot be imported ({error}): use pip to install it"
        ) from None
    for name, value in _NO_WORKSPACE.items():
        os.environ.setdefault(name, value)
    torch.backends.cuda.preferred_blas_library("cublaslt")
    return TritonOps("cuda", num_threads)


BACKENDS: Final = (Backend(name="triton", about="for NVIDIA GPUs", make=_make, device="cuda", order=1, fit=_fit),)
