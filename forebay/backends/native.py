"""C++ kernels for the CPU: `native` for its best instruction set, and one backend for each instruction set by name."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forebay.backends.backend import Backend, Fit, Here, OpsOptions
from forebay.base.cpu import Cpu, this_cpu
from forebay.base.errors import ConfigError
from forebay.base.log import event, get_logger
from forebay.base.toolchain import find_compiler
from forebay.base.variants import AMX, VARIANTS

if TYPE_CHECKING:
    from forebay.ops.interface import Ops

_log = get_logger("ops")


def _resolve(cpu: Cpu) -> str:
    return next((variant.name for variant in cpu.variants), "torch")


def _fit(here: Here) -> Fit:
    if not here.cpu.variants:
        return Fit(False, "the CPU has neither AVX2 nor NEON")
    best = _resolve(here.cpu)
    if any(path for folder in here.kernel_folders for path in folder.glob(f"{best}-*.so")):
        return Fit(True, f"{best}, compiled earlier")
    found = find_compiler()
    if found is None:
        return Fit(False, "there is no C++ compiler: install g++ for several times the speed")
    return Fit(True, f"{best}, which {Path(found).name} will compile")


def _make_best(options: OpsOptions) -> Ops:
    """Compile on first use. Without such a CPU or a compiler the ops are torch's, with one warning."""
    from forebay.ops.compiler import BuildError, library
    from forebay.ops.interface import Ops
    from forebay.ops.native.ops import NativeOps

    reasons, (num_threads, bits, memory, *_) = [], options
    for variant in this_cpu().variants:
        try:
            return NativeOps(library(variant), variant.name, num_threads, bits, memory)
        except (BuildError, OSError) as error:
            reasons.append(f"{variant.name}: {error}")
    why = "; ".join(reasons) or "the CPU is not an x86-64 with AVX2 or an aarch64 under Linux"
    _log.warning(event("native_ops_unavailable", using="torch", effect="several times slower", why=why))
    return Ops(num_threads)


def _make_variant(name: str, options: OpsOptions) -> Ops:
    from forebay.ops.compiler import BuildError, library
    from forebay.ops.native.ops import NativeOps

    cpu = this_cpu()
    variants = {variant.name: variant for variant in cpu.variants}
    if name not in variants:
        needs = next(variant.needs for variant in VARIANTS if variant.name == name)
        raise ConfigError(
            f"this CPU does not run the {name} kernels, which need {', '.join(sorted(needs - cpu.flags))} too: "
            f"use {', '.join(['native', *variants, 'torch'])}"
        )
    try:
        num_threads, bits, memory, *_ = options
        return NativeOps(library(variants[name]), name, num_threads, bits, memory)
    except (BuildError, OSError) as error:
        raise ConfigError(f"the {name} kernels cannot be had: {error}; use native or torch") from error


BACKENDS: Final = (
    Backend(
        name="native",
        about="compiled for this machine's CPU",
        make=_make_best,
        order=2,
        fit=_fit,
        rounds_inputs=True,
        widens_bfloat16=True,
        resolve=_resolve,
    ),
    *(
        Backend(
            name=variant.name,
            about="for these instructions of it",
            make=partial(_make_variant, variant.name),
            order=3,
            rounds_inputs=variant.name != AMX,
            widens_bfloat16=True,
        )
        for variant in VARIANTS
    ),
)
