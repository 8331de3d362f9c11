"""Which backend runs here."""

from __future__ import annotations

from forebay.base.errors import ConfigError
from forebay.base.log import event, get_logger
from forebay.ops.compiler import BuildError, library, usable_variants
from forebay.ops.interface import Ops
from forebay.ops.native import NativeOps
from forebay.ops.reference import TorchOps

_log = get_logger("ops")


def make_ops(backend: str, num_threads: int) -> Ops:
    """The kernels of `backend` (`native` or `torch`) on `num_threads` threads.

    `native` takes the best instruction set of this CPU, compiling on first use, and becomes `torch` with one warning
    where there is no such CPU or no compiler. The torch backend uses torch's own threads: set those yourself.
    """
    if backend not in ("native", "torch"):
        raise ConfigError(f"kernel backend {backend!r}: use native or torch")
    if num_threads < 1:
        raise ConfigError(f"{num_threads} threads: use at least 1")
    if backend == "torch":
        return TorchOps(num_threads)
    reasons = []
    for variant in usable_variants():
        try:
            return NativeOps(library(variant), variant.name, num_threads)
        except (BuildError, OSError) as error:
            reasons.append(f"{variant.name}: {error}")
    why = "; ".join(reasons) or "the CPU is not an x86-64 with AVX2 under Linux"
    _log.warning(event("native_ops_unavailable", using="torch", effect="several times slower", why=why))
    return TorchOps(num_threads)
