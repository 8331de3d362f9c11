"""Copies between the device and the other tiers of the prefix cache, until a step has made them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from forebay.memory.radix_node import Match, Pin
from forebay.memory.tier import Prefix, Span, Tier
from forebay.requests.request import Request


class Store(NamedTuple):
    """A copy to a tier, into the slots `span` that are taken there, of a prefix that a request computed. Once it is
    made, the tier retains what the request asks for, from time `retain_at` on; None if nothing is to be retained."""

    tier: Tier
    span: Span
    req: Request
    retain_at: float | None = None


@dataclass(slots=True, eq=False)
class Load:
    """A copy from a tier into the slots `span` that are taken on the device, for a request that waits.

    Until it is made, `match` and `pin` protect the copied slots in the tier; the pin is None if they were dropped. The
    prefix is `prefix` in the tier."""

    req: Request
    step: int  # that copies it
    tier: Tier
    prefix: Prefix
    span: Span
    match: Match
    pin: Pin | None


def namespace_in(req: Request, tier: Tier) -> str | None:
    """Return the namespace of a request's prefix in a tier; None if the tier cannot have it."""
    return req.durable_namespace if tier.durable else req.cache_namespace
