"""The reference: every op as torch has it, on any CPU. It uses torch's own threads, which the caller sets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from forebay.backends.backend import Backend, Fit, OpsOptions

if TYPE_CHECKING:
    from forebay.ops.interface import Ops


def _make(options: OpsOptions) -> Ops:
    from forebay.ops.interface import Ops

    return Ops(options.num_threads)


BACKENDS: Final = (
    Backend(
        name="torch",
        about="the reference",
        make=_make,
        order=9,
        fit=lambda here: Fit(True, ""),
        uses_codes=False,
    ),
)
