"""Isolation of clients: which requests share a prefix cache, and which may learn of others' prompts (C29, decision
11)."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Final, NamedTuple

import msgspec

from forebay.config.engine_config import CacheIsolation
from forebay.memory.radix_node import OPERATOR


class Tenant(NamedTuple):
    """The holder of one API key: the key's digest, and the name that the operator gave its holder; "" where none was
    needed."""

    digest: str
    is_admin: bool = False
    name: str = ""


ANYBODY: Final = Tenant("")


class Session(NamedTuple):
    """The user fields of a request, "" for those that it lacks: claims, which any holder of the key may make as
    well."""

    user: str = ""
    safety_identifier: str = ""
    prompt_cache_key: str = ""
    cache_salt: str = ""


class Isolation:
    """Names for namespaces and authors. All are keyed hashes of everything they stand for, so that nothing a client can
    write gives another's name, and none of them tells what it was made of."""

    def __init__(self, wanted: CacheIsolation) -> None:
        self._wanted = wanted
        self._secret = secrets.token_bytes(32)

    def namespace(self, tenant: Tenant, session: Session) -> str:
        """The prefix cache that a request uses. A `cache_salt` always makes one of its own."""
        if self._wanted is CacheIsolation.USER:
            return self._name("user", tenant.digest, *session)
        if self._wanted is CacheIsolation.KEY:
            return self._name("key", tenant.digest, session.cache_salt)
        return self._name("none", session.cache_salt)

    def author(self, tenant: Tenant, session: Session) -> str:
        """Return whose prompts a request may learn of: those of its own session; for an admin, everybody's; without a
        session, nobody's."""
        if tenant.is_admin:
            return OPERATOR
        if not any(session):
            return secrets.token_hex(16)
        return self._name("author", tenant.digest, *session)

    def _name(self, *parts: str) -> str:
        # With their lengths, so that no two lists of parts are the same bytes, whatever is in them.
        return hmac.new(self._secret, msgspec.msgpack.encode(parts), hashlib.sha256).hexdigest()
