"""Responses that clients may name later: in memory, bounded for each API key."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, NamedTuple

import msgspec

from forebay.base.errors import InvalidRequest, NotFound
from forebay.http.security import Tenant


class Stored(NamedTuple):
    """`items` are all of the conversation, the response's own output last. Both are JSON."""

    response: bytes
    items: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.response) + len(self.items)


class _Shelf:
    """The responses of one key, the least recently used first."""

    def __init__(self) -> None:
        self.responses = OrderedDict[str, Stored]()
        self.num_bytes = 0

    def drop(self, response_id: str) -> bool:
        found = self.responses.pop(response_id, None)
        self.num_bytes -= found.num_bytes if found is not None else 0
        return found is not None


class ResponseStore:
    """Each key has a shelf of `max_bytes`, and reaches nothing on another's. A response that is larger than the shelf
    is not stored. Safe on any thread: long answers are written by a worker."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._shelves: dict[str, _Shelf] = {}
        self._lock = threading.Lock()

    @property
    def is_on(self) -> bool:
        return self._max_bytes > 0

    def put(self, tenant: Tenant, response: dict[str, Any], items: list[dict[str, Any]]) -> None:
        """Store a response and the items that led to it for one API key. The oldest responses of that key are dropped
        while it exceeds its bytes."""
        stored = Stored(msgspec.json.encode(response), msgspec.json.encode([*items, *response["output"]]))
        with self._lock:
            shelf = self._shelves.setdefault(tenant.digest, _Shelf())
            shelf.drop(response["id"])
            shelf.responses[response["id"]] = stored
            shelf.num_bytes += stored.num_bytes
            while shelf.num_bytes > self._max_bytes:
                shelf.drop(next(iter(shelf.responses)))

    def get(self, tenant: Tenant, response_id: str, *, param: str | None = None) -> Stored:
        """Raises NotFound; InvalidRequest if nothing is stored at all. `param` is the field that names the response."""
        self.check_is_on(param)
        with self._lock:
            shelf = self._shelves.get(tenant.digest, _Shelf())
            if response_id not in shelf.responses:
                raise self._unknown(response_id, param)
            shelf.responses.move_to_end(response_id)
            return shelf.responses[response_id]

    def delete(self, tenant: Tenant, response_id: str) -> None:
        """Raises as `get`."""
        self.check_is_on(None)
        with self._lock:
            if not self._shelves.get(tenant.digest, _Shelf()).drop(response_id):
                raise self._unknown(response_id, None)

    def check_is_on(self, param: str | None) -> None:
        """Raises InvalidRequest if this server stores nothing."""
        if not self.is_on:
            raise InvalidRequest(
                "this server stores no responses (--responses-store-bytes): "
                + ("send the whole conversation as input" if param == "previous_response_id" else "set store=false"),
                code="responses_not_stored",
                param=param,
            )

    def _unknown(self, response_id: str, param: str | None) -> NotFound:
        return NotFound(
            f"there is no stored response {response_id[:200]!a}: send the whole conversation as input",
            code="response_not_found",
            param=param,
        )
