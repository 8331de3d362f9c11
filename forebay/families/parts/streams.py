"""Several residual streams, as DeepSeek V4 has them."""

from __future__ import annotations

from typing import Final

from forebay.families.base.fields import Fields
from forebay.families.base.mixers import HyperConnections

_MOST_STREAMS: Final = 16
_MOST_ITERATIONS: Final = 100


def hyper_connections(fields: Fields) -> HyperConnections:
    """Read how residual streams are mixed."""
    return HyperConnections(
        num_streams=fields.size("hc_mult", default=4, most=_MOST_STREAMS),
        iterations=fields.size("hc_sinkhorn_iters", default=20, most=_MOST_ITERATIONS),
        eps=fields.number("hc_eps", default=1e-6),
    )
