"""Who may ask what: API keys, host and origin rules, and the exposure rule at start-up.

Deny by default: with keys configured every request needs one, whatever its path looks like, except `PUBLIC`.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Iterable
from typing import Final

from forebay.base.errors import NotFound, Unauthorized
from forebay.base.exposure import check_exposure
from forebay.config.engine_config import ServerConfig
from forebay.server.errors import HttpError

PUBLIC: Final = frozenset({("GET", "/health")})
ADMIN_PATHS: Final = frozenset({"/flush_cache"})
_LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_WILDCARDS: Final = frozenset({"", "0.0.0.0", "::"})  # an address to bind to, never a default

Headers = Iterable[tuple[bytes, bytes]]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Security:
    """Decisions about a request from its scope alone. Keys are kept as SHA-256 digests."""

    def __init__(self, config: ServerConfig) -> None:
        check_exposure(config.host, config.api_keys)
        self._keys = [_digest(key.encode()) for key in config.api_keys]
        self._admin_keys = [_digest(key.encode()) for key in config.admin_api_keys]
        self._hosts = _LOOPBACK_NAMES | {_host_name(host) for host in (config.host, *config.allowed_hosts)} - _WILDCARDS
        self._any_address = config.host in _WILDCARDS
        self._origins = frozenset(config.cors_origins)
        self._secret = secrets.token_bytes(32)

    @property
    def open(self) -> bool:
        """No key is configured (only possible on loopback)."""
        return not self._keys and not self._admin_keys

    def check_host(self, headers: Headers) -> None:
        """A page of another site must not reach this server through a name that resolves here (DNS rebinding), nor post
        to it from a form."""
        hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
        if len(hosts) != 1:
            raise HttpError(400, f"the request has {len(hosts)} Host headers; it must have one", code="invalid_host")
        name = _host_name(hosts[0])
        if name not in self._hosts and not (self._any_address and _is_address(name)):
            raise HttpError(
                403,
                "this Host is not served here: add it with --allowed-host",
                code="host_not_allowed",
                type="permission_error",
            )
        for header, value in headers:
            if header == b"origin":
                self._check_origin(value.decode("latin-1"), hosts[0])

    def _check_origin(self, origin: str, host: str) -> None:
        if origin not in self._origins and origin not in (f"http://{host}", f"https://{host}"):
            raise HttpError(
                403,
                "this Origin may not use the server: add it with --cors-origin",
                code="origin_not_allowed",
                type="permission_error",
            )

    def authorize(self, method: str, path: str, headers: Headers, *, public: bool = False) -> str:
        """The tenant of the request, a string for `namespace`. Raises Unauthorized, a 403, or NotFound for an admin
        route of a server without an admin key. `public` is true for the console's own files, which hold nothing."""
        if self.open:
            return ""
        if public or (method, path) in PUBLIC or (not self._keys and path not in ADMIN_PATHS):
            return ""
        digest = _digest(_bearer(headers))
        admin = _among(digest, self._admin_keys)
        user = _among(digest, self._keys)
        if not (admin or user):
            raise Unauthorized("the API key is missing or wrong: send `Authorization: Bearer <key>`")
        if path in ADMIN_PATHS and not admin:
            if not self._admin_keys:
                raise NotFound(f"{path} does not exist: it needs --admin-api-key-file")
            raise HttpError(403, "this needs an admin key", code="admin_key_required", type="permission_error")
        return digest.hex()

    def namespace(self, tenant: str, cache_salt: str | None) -> str:
        """What separates the prefix caches: nobody can name another tenant's, nor learn the secret behind it."""
        if not tenant and cache_salt is None:
            return ""
        label = f"{tenant}\0{cache_salt if cache_salt is not None else ''}".encode()
        return hmac.new(self._secret, label, hashlib.sha256).hexdigest()


def _among(digest: bytes, known: list[bytes]) -> bool:
    found = False
    for other in known:  # all of them: time tells nothing
        found |= hmac.compare_digest(digest, other)
    return found


def _bearer(headers: Headers) -> bytes:
    values = [value for name, value in headers if name == b"authorization"]
    if len(values) != 1 or not values[0].startswith(b"Bearer "):
        raise Unauthorized("the API key is missing: send one header `Authorization: Bearer <key>`")
    return values[0][len(b"Bearer ") :]


def _host_name(host: str) -> str:
    """`[::1]:30000` -> `::1`, `Localhost:80` -> `localhost`."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0] if host.count(":") == 1 else host


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
