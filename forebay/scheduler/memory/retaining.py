"""The retention of prefixes as requests ask for it, on the device and in the tiers behind it."""

from __future__ import annotations

from collections.abc import Sequence

from forebay.memory.radix_cache import RadixCache
from forebay.memory.retention import Retained
from forebay.memory.tier import Tier
from forebay.requests.request import Request
from forebay.scheduler.memory.tier_copies import Store, namespace_in


def retain_prefixes(cache: RadixCache, req: Request, namespace: str, now: float) -> tuple[Retained | None, str]:
    """Retain the prefixes that a request asks for, as far as a cache has them. Return the longest, and why that is not
    all: "" if it is."""
    found, why = None, ""
    most = req.num_prompt - cache.at_ends  # no state is kept behind the last token of a prompt
    for asked in req.retentions:
        num_tokens = min(asked.num_tokens, most) // cache.page_size * cache.page_size
        match = cache.index.match(req.key(num_tokens), namespace)
        why = match.reason if not num_tokens or match.num_tokens < num_tokens else ""
        if match.num_tokens:
            kept = cache.retain(match, req.tenant, asked.ttl_s, now)
            found, why = (kept, why) if isinstance(kept, Retained) else (found, kept)
    return found, why


class TierRetention:
    """The prefixes that the tiers behind the device retain, each as far as it has what a request asks for. `stores` are
    the copies under way, by number."""

    def __init__(self, tiers: Sequence[Tier], stores: dict[int, Store]) -> None:
        self._tiers, self._stores = tiers, stores

    def retain(self, req: Request, now: float) -> None:
        """Retain what a request asks for from time `now` on: in each tier once the last of the request's copies there
        is made, if there are any."""
        for tier in self._tiers:
            numbers = [number for number, each in self._stores.items() if each.tier is tier and each.req is req]
            if numbers:
                self._stores[numbers[-1]] = self._stores[numbers[-1]]._replace(retain_at=now)
            else:
                self._retain_in(tier, req, now)

    def stored(self, store: Store) -> None:
        """Handle that a copy is made: retain what waited for it."""
        if store.retain_at is not None:
            self._retain_in(store.tier, store.req, store.retain_at)

    def _retain_in(self, tier: Tier, req: Request, now: float) -> None:
        namespace = namespace_in(req, tier)
        if namespace is not None:
            retain_prefixes(tier.cache, req, namespace, now)

    def use(self, req: Request, num_tokens: int) -> None:
        """Extend in each tier the longest retained prefix among the first `num_tokens` tokens of a request, which are
        reused from the device."""
        for tier in self._tiers:
            namespace = namespace_in(req, tier)
            if namespace is not None and tier.cache.retention.nodes:
                match = tier.cache.index.match(req.key(num_tokens), namespace)
                node = match.node if match.inside == len(match.node.key) else match.node.parent
                if node is not None:
                    tier.cache.retention.use(node, req.arrival)

    @property
    def num_given_up(self) -> int:
        """Prefixes that lost their retention in these tiers before its time."""
        return sum(tier.cache.retention.num_given_up for tier in self._tiers)
