"""A GPU's Triton kernels in Triton's interpreter, so that `forebay verify` asks them its questions without a GPU."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from forebay.backends.backend import Backend, OpsOptions
from forebay.base.errors import ConfigError

if TYPE_CHECKING:
    from forebay.ops.interface import Ops

_VARIABLE: Final = "TRITON_INTERPRET"


def _make(options: OpsOptions) -> Ops:
    """Return the kernels, of which every dense product is Forebay's own: a start on a GPU compares the library's."""
    if os.environ.get(_VARIABLE) != "1":
        raise ConfigError(f"Triton's interpreter is chosen by the environment: set {_VARIABLE}=1")
    try:
        from forebay.ops.triton import TritonOps
        from forebay.ops.triton.choices import ALL_ROWS, Choice, Choices
    except ImportError as error:
        raise ConfigError(f"Triton cannot be imported ({error}): use pip to install it") from None
    choices = Choices(lambda weight: Choice(ALL_ROWS, "no library is compared in the interpreter"))
    return TritonOps("cpu", options.num_threads, choices, options.memory)


BACKENDS: Final = (
    Backend(
        name="triton-interpreter",
        about="for NVIDIA GPUs, in Triton's interpreter",
        make=_make,
        order=20,
        chunked_scans=True,
    ),
)
