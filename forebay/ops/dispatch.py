"""Which backend runs here."""

from __future__ import annotations

from forebay.base.errors import ConfigError
from forebay.ops.interface import Ops
from forebay.ops.reference import TorchOps


def make_ops(backend: str, num_threads: int) -> Ops:
    """The kernels of `backend` (`native` or `torch`) on `num_threads` threads."""
    if backend not in ("native", "torch"):
        raise ConfigError(f"kernel backend {backend!r}: use native or torch")
    return TorchOps(num_threads)
