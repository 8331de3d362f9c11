"""Which backend runs here."""

from __future__ import annotations

import torch

from forebay.base.cpu import this_cpu
from forebay.base.errors import ConfigError
from forebay.base.log import event, get_logger
from forebay.base.variants import VARIANTS
from forebay.ops.compiler import BuildError, library
from forebay.ops.interface import Ops
from forebay.ops.native import NativeOps
from forebay.ops.weight_memory import WeightMemory

_log = get_logger("ops")
_BACKENDS = ("native", *(variant.name for variant in VARIANTS), "torch", "triton")


def make_ops(backend: str, num_threads: int, activation_bits: int = 16, memory: WeightMemory | None = None) -> Ops:
    """The kernels of `backend` (`native`, the name of a variant, `torch` or `triton`) on `num_threads` threads.

    `native` takes the best instruction set of this CPU, compiling on first use, and becomes `torch` with one warning
    where there is no such CPU or no compiler. A variant named (`avx2`) is that one, and ConfigError where it cannot
    be. The torch backend uses torch's own threads: set those yourself. `triton` is for tensors on an NVIDIA GPU, and
    ConfigError where there is none. Only the native ops without AMX round to `activation_bits` (`LinearOps`). They
    pack weights into `memory`; None: into some of torch's.
    """
    if backend not in _BACKENDS:
        raise ConfigError(f"kernel backend {backend!r}: use {', '.join(_BACKENDS[:-1])} or {_BACKENDS[-1]}")
    if num_threads < 1:
        raise ConfigError(f"{num_threads} threads: use at least 1")
    if backend == "torch":
        return Ops(num_threads)
    if backend == "triton":
        return _triton_ops(num_threads)
    if backend != "native":
        return _variant_ops(backend, num_threads, activation_bits, memory)
    reasons = []
    for variant in this_cpu().variants:
        try:
            return NativeOps(library(variant), variant.name, num_threads, activation_bits, memory)
        except (BuildError, OSError) as error:
            reasons.append(f"{variant.name}: {error}")
    why = "; ".join(reasons) or "the CPU is not an x86-64 with AVX2 under Linux"
    _log.warning(event("native_ops_unavailable", using="torch", effect="several times slower", why=why))
    return Ops(num_threads)


def _variant_ops(name: str, num_threads: int, activation_bits: int, memory: WeightMemory | None) -> Ops:
    cpu = this_cpu()
    variants = {variant.name: variant for variant in cpu.variants}
    if name not in variants:
        needs = next(variant.needs for variant in VARIANTS if variant.name == name)
        raise ConfigError(
            f"this CPU does not run the {name} kernels, which need {', '.join(sorted(needs - cpu.flags))} too: "
            f"use {', '.join(['native', *variants, 'torch'])}"
        )
    try:
        return NativeOps(library(variants[name]), name, num_threads, activation_bits, memory)
    except (BuildError, OSError) as error:
        raise ConfigError(f"the {name} kernels cannot be had: {error}; use native or torch") from error


def _triton_ops(num_threads: int) -> Ops:
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
