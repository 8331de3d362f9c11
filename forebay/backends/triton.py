"""Triton kernels, for tensors on an NVIDIA GPU. CUDA builds of torch bring Triton along."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from forebay.backends.backend import Backend, Fit, Here
from forebay.base.errors import ConfigError

if TYPE_CHECKING:
    from forebay.ops.interface import Ops
    from forebay.ops.weight_memory import WeightMemory


def _fit(here: Here) -> Fit:
    return Fit(here.has_gpu, "those for GPUs" if here.has_gpu else "")


def _make(num_threads: int, activation_bits: int, memory: WeightMemory | None) -> Ops:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f"there is no NVIDIA GPU that this torch ({torch.__version__}) can use: install its build for CUDA and "
            "the driver, or use --device cpu"
        )
    try:
        from forebay.ops.triton import TritonOps
    except ImportError as error:
        raise ConfigError(
            f"the GPU's kernels need Triton, which cannot be imported ({error}): use pip to install it"
        ) from None
    return TritonOps("cuda", num_threads)


BACKENDS: Final = (Backend(name="triton", about="for NVIDIA GPUs", make=_make, device="cuda", order=1, fit=_fit),)
