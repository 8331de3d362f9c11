"""Requests that are being answered, by whose they are and what their clients call them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from forebay.server.http.isolation import Tenant


class _Known(NamedTuple):
    ids: tuple[str | None, ...]
    abort: Callable[[], None]


class UnderWay:
    """Belongs to the event loop. Nobody reaches another's requests, whatever ids he knows."""

    def __init__(self) -> None:
        self._of: dict[str, list[_Known]] = {}

    @contextmanager
    def known(self, tenant: Tenant, ids: tuple[str | None, ...], abort: Callable[[], None]) -> Iterator[None]:
        """As long as it is being answered it can be ended by one of these ids."""
        known = _Known(ids, abort)
        own = self._of.setdefault(tenant.digest, [])
        own.append(known)
        try:
            yield
        finally:
            own.remove(known)
            if not own:
                self._of.pop(tenant.digest, None)

    def abort(self, tenant: Tenant, wanted: str | None) -> int:
        """End those of this tenant that have this id, all of them for None; how many."""
        found = [known for known in self._of.get(tenant.digest, ()) if wanted is None or wanted in known.ids]
        for known in found:
            known.abort()
        return len(found)
