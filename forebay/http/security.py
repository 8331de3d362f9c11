"""Access rules: API keys, hosts and origins, isolation of tenants (C29, decision 11), and proofs between servers.

Deny by default: with keys configured every request needs one, whatever its path looks like, except for the routes and
files that declare otherwise (`http/route.py`).

A gateway says in headers where the two halves of a request meet, so that it forwards the client's body unchanged. It
proves for each message that it has the cluster key (`base/proof.py`). Without the proof these headers are refused: they
make a decode server connect to a host (SSRF).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec
from starlette.routing import compile_path
from starlette.types import Scope

from forebay.base.errors import ConfigError, NotFound, Unauthorized
from forebay.base.exposure import check_exposure
from forebay.base.proof import BOOTSTRAP, PROOF, BadProof, Fault, Message, Proofs
from forebay.config.config import ServerConfig
from forebay.config.disaggregation import peer_address
from forebay.config.engine_config import CacheIsolation
from forebay.http.errors import HttpError
from forebay.http.route import Access, Route
from forebay.memory.radix_node import OPERATOR

_KEYLESS: Final = frozenset({Access.FILE, Access.PROBE})
_STRICTNESS: Final[Mapping[Access, int]] = {access: rank for rank, access in enumerate(Access)}
_LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_WILDCARDS: Final = frozenset({"", "0.0.0.0", "::"})  # an address to bind to, never a default
_HOST: Final = re.compile(r"(?:\[(?P<ipv6>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::(?P<port>[0-9]{0,5}))?")
_MAX_PORT: Final = 65535
_HOW: Final = "send one header `Authorization: Bearer <key>` or `x-api-key: <key>`"
_OWN_SITES: Final = frozenset({b"same-origin", b"none"})  # `none`: the user asked, and no page

Headers = Sequence[tuple[bytes, bytes]]


class AccessRules:
    """Returns the access that a request needs. A path has the rule of its route; an unknown one needs a user's key."""

    def __init__(self, routes: Iterable[Route[Any]], files: Iterable[str] = ()) -> None:
        """`files` are the paths of files that hold nothing of the operator's."""
        self._patterns: list[tuple[re.Pattern[str], str, Access]] = []
        self._of_path: dict[str, list[tuple[str, Access]]] = {path: [("GET", Access.FILE)] for path in files}
        for route in routes:
            if route.parameters:
                self._patterns.append((compile_path(route.path)[0], route.method, route.access))
            else:
                self._of_path.setdefault(route.path, []).append((route.method, route.access))
        for path, rules in self._of_path.items():
            rules += self._matching(path)
        self.paths: Final = frozenset(self._of_path)

    def of(self, method: str, path: str) -> Access:
        """Return the strictest access of the routes of this path. With a method that none of them has it is at least a
        user's key, before the method is refused."""
        rules = self._of_path.get(path) or self._matching(path)
        found = [access for of_method, access in rules if of_method == method]
        return max(found or [Access.USER, *(access for _, access in rules)], key=_STRICTNESS.__getitem__)

    def _matching(self, path: str) -> list[tuple[str, Access]]:
        return [(method, access) for pattern, method, access in self._patterns if pattern.match(path)]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Security:
    """Decisions about a request from its scope alone. Keys are kept as SHA-256 digests."""

    def __init__(self, config: ServerConfig) -> None:
        check_exposure(config.host, config.api_keys)
        self._keys = [_digest(key.encode()) for key in config.api_keys]
        self._admin_keys = [_digest(key.encode()) for key in config.admin_api_keys]
        self.open = not self._keys and not self._admin_keys  # only possible on loopback
        self._names = {_digest(key.encode()): name for key, name in config.key_names.items()}
        self._hosts = _LOOPBACK_NAMES | {_configured_name(host) for host in (config.host, *config.allowed_hosts)}
        self._hosts -= _WILDCARDS
        self._any_address = config.host in _WILDCARDS
        self._origins = frozenset(config.cors_origins)
        isolated = config.cache_isolation
        many = isolated is CacheIsolation.USER or (isolated is CacheIsolation.KEY and len(self._keys) > 1)
        self._hides_totals = many and bool(self._keys)

    def may_administer(self, tenant: Tenant) -> bool:
        """Return whether admin routes would be this one's to use."""
        return tenant.is_admin or self.open

    def check_host(self, headers: Headers, *, public: bool = False) -> None:
        """Refuse a page of another site that reaches this server through a name that resolves to it (DNS rebinding), or
        that posts a form to it. It may link to routes that are `public`."""
        hosts = [value.decode("latin-1").lower() for name, value in headers if name == b"host"]
        if len(hosts) != 1:
            raise HttpError(400, f"the request has {len(hosts)} Host headers; it must have one", code="invalid_host")
        name = host_name(hosts[0])
        if name is None:
            raise HttpError(400, f"Host is {hosts[0][:100]!a}: it must be a name and a port", code="invalid_host")
        if name not in self._hosts and not (self._any_address and _is_address(name)):
            raise _forbidden("this Host is not served here: add it with --allowed-host", "host_not_allowed")
        if not public:
            self._check_site(headers, hosts[0])

    def _check_site(self, headers: Headers, host: str) -> None:
        """A browser names the page's origin, or, where the page only embeds or links to this, how near the page is."""
        origins = [value.decode("latin-1") for name, value in headers if name == b"origin"]
        sites = {value for name, value in headers if name == b"sec-fetch-site"}
        ours = {f"http://{host}", f"https://{host}", *self._origins}
        if not ours.issuperset(origins) or not (origins or sites <= _OWN_SITES):
            raise _forbidden(
                "pages of other origins may not use this server: add theirs with --cors-origin", "origin_not_allowed"
            )

    def may_see_totals(self, tenant: Tenant) -> bool:
        """Return whether a tenant may see totals over all clients: not if several tenants are isolated from each other
        (C29)."""
        return tenant.is_admin or not self._hides_totals

    def authorize(self, access: Access, path: str, headers: Headers) -> Tenant:
        """Return the caller of a request for a path that needs this access. Raises Unauthorized, a 403, or NotFound for
        an admin route of a server without an admin key."""
        if self.open or access in _KEYLESS or (not self._keys and access is not Access.ADMIN):
            return ANYBODY
        digest = _digest(_key(headers))
        admin = _among(digest, self._admin_keys)
        user = _among(digest, self._keys)
        if not (admin or user):
            raise Unauthorized(f"the API key is missing or wrong: {_HOW}")
        if not admin and (access is Access.ADMIN or (access is Access.TOTALS and self._hides_totals)):
            if not self._admin_keys:
                raise NotFound(f"{path} does not exist: it needs --admin-api-key-file")
            raise _forbidden("this needs an admin key", "admin_key_required")
        return Tenant(digest.hex(), admin, self._names.get(digest, ""))


def _among(digest: bytes, known: list[bytes]) -> bool:
    found = False
    for other in known:  # all of them: time tells nothing
        found |= hmac.compare_digest(digest, other)
    return found


def _key(headers: Headers) -> bytes:
    """The one key that is sent: as OpenAI's clients do, as Anthropic's do, or in both ways."""
    bearers = [value for name, value in headers if name == b"authorization"]
    keys = [value for name, value in headers if name == b"x-api-key"]
    fits = len(bearers) <= 1 and len(keys) <= 1 and all(value.startswith(b"Bearer ") for value in bearers)
    sent = {value.removeprefix(b"Bearer ") for value in bearers} | {*keys}
    if not fits or len(sent) != 1:
        raise Unauthorized(f"the API key is missing: {_HOW}")
    return sent.pop()


def _forbidden(message: str, code: str) -> HttpError:
    return HttpError(403, message, code=code, type="permission_error")


def host_name(host: str) -> str | None:
    """Return the name or address in a Host field, in lower case and an address in its shortest spelling; None if the
    field is no host with an optional port (RFC 9110, 7.2). Names have letters, digits, dots, dashes and underscores:
    others can be written in a URI, but not resolved."""
    found = _HOST.fullmatch(host.lower())
    if found is None or int(found["port"] or 0) > _MAX_PORT:
        return None
    if found["ipv6"] is None:
        return found["name"]
    try:
        return str(ipaddress.IPv6Address(found["ipv6"]))
    except ValueError:
        return None


def _configured_name(host: str) -> str:
    """Return the host name of an operator's setting, which need not have brackets around an address."""
    if not host or _is_address(host):
        return str(ipaddress.ip_address(host)) if host else host
    name = host_name(host)
    if name is None:
        raise ConfigError(f"{host[:100]!a} is not a host: give a name or an address, as in --allowed-host example.org")
    return name


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Tenant(NamedTuple):
    """The holder of one API key: the key's digest, and the name that the operator gave its holder; "" if no key was
    required."""

    digest: str
    is_admin: bool = False
    name: str = ""


ANYBODY: Final = Tenant("")
ALL_CLIENTS: Final = ""  # the namespace of clients that are not kept apart: the same on each server


class Session(NamedTuple):
    """The user fields of a request, "" for those that it lacks: claims, which any holder of the key may make as
    well."""

    user: str = ""
    safety_identifier: str = ""
    prompt_cache_key: str = ""
    cache_salt: str = ""


class Isolation:
    """Names for namespaces and authors. All are keyed hashes of their parts, so that no field of a request can produce
    another client's name, and no name reveals its parts."""

    def __init__(self, wanted: CacheIsolation, secret: bytes | None = None) -> None:
        """`secret` is for processes that must compute the same names; otherwise each has one of its own."""
        self._wanted = wanted
        self._secret = secrets.token_bytes(32) if secret is None else secret

    def namespace(self, tenant: Tenant, session: Session) -> str:
        """The prefix cache that a request uses: that of all clients, unless they are kept apart. A `cache_salt` always
        makes one of its own."""
        if self._wanted is CacheIsolation.USER:
            return self._name("user", tenant.digest, *session)
        if self._wanted is CacheIsolation.KEY:
            return self._name("key", tenant.digest, session.cache_salt)
        return self._name("none", session.cache_salt) if session.cache_salt else ALL_CLIENTS

    def author(self, tenant: Tenant, session: Session) -> str:
        """Return the author whose prompts a request may see: its own session; every author for an admin; none for a
        request without a session."""
        if tenant.is_admin:
            return OPERATOR
        if not any(session):
            return secrets.token_hex(16)
        return self._name("author", tenant.digest, *session)

    def _name(self, *parts: str) -> str:
        # With their lengths, so that no two lists of parts are the same bytes, whatever is in them.
        return hmac.new(self._secret, msgspec.msgpack.encode(parts), hashlib.sha256).hexdigest()


NAMES: Final = ("room", "host", "port")
_PROOF, _BOOTSTRAP = PROOF.encode(), BOOTSTRAP.encode()
KEY_REQUIRED: Final = "cluster_key_required"


@dataclass(frozen=True, slots=True)
class Sender:
    """The sender of a request by its headers. `is_gateway`: it has the cluster key, or needs none. `digest` is the
    SHA-256 of the body that it has proved, "" for a sender without a proof. `bootstrap` are its own words about the
    other half, by name (`NAMES`)."""

    is_gateway: bool = False
    digest: str = ""
    bootstrap: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


class Cluster:
    """The rules for prefill addresses: which senders may give one, and which servers may be named."""

    def __init__(self, config: ServerConfig) -> None:
        self._proofs = Proofs(config.cluster_key) if config.cluster_key else None
        self._trusts_all = config.insecure_no_cluster_key and not config.cluster_key
        self._prefill_servers = frozenset(map(peer_address, config.prefill_servers))

    @property
    def has_configured_servers(self) -> bool:
        return bool(self._prefill_servers)

    def is_configured(self, host: str, port: int) -> bool:
        """Return whether the operator has named this prefill server."""
        return (host.lower(), port) in self._prefill_servers

    def check_trusted(self, sender: Sender, *, is_open: bool) -> None:
        """Raises HttpError 403 for a sender that is not trusted as a server of this cluster. A server without any key,
        which is on loopback (`is_open`), trusts all that reach it."""
        if not (sender.is_gateway or (is_open and self._proofs is None)):
            raise refused(
                f"this is for servers and routers with the cluster key: start them and this router with the same "
                f"--cluster-key-file; they prove it in the header {PROOF}"
            )

    def sender(self, scope: Scope) -> Sender:
        """Return the sender of the request of an ASGI scope. Raises HttpError 403 for headers of gateways without the
        right proof, and 400 for one that comes twice."""
        ours = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name == _PROOF or name.startswith(_BOOTSTRAP)
        ]
        if not ours:
            return Sender(self._trusts_all)
        found = dict(ours)
        if len(found) != len(ours):
            raise HttpError(400, f"a header {BOOTSTRAP}* or {PROOF} occurs twice", code="invalid_header")
        return self._gateway(scope, found)

    def _gateway(self, scope: Scope, found: dict[str, str]) -> Sender:
        """Return the gateway that sent these headers: its proof, and the fields of the rendezvous."""
        headers: Headers = scope["headers"]
        proof = found.pop(PROOF, "")
        host = next((value.decode("latin-1") for name, value in headers if name == b"host"), "")
        message = Message(method=scope["method"], target=_target(scope), host=host, bootstrap=found)
        digest = "" if self._trusts_all else self._proved(proof, message)
        words = {name: found.get(BOOTSTRAP + name) for name in NAMES}
        if unknown := found.keys() - {BOOTSTRAP + name for name in NAMES}:
            raise HttpError(400, f"{min(unknown)[:64]!a} is no header of a gateway", code="invalid_header")
        return Sender(True, digest, {name: word for name, word in words.items() if word is not None})

    def _proved(self, proof: str, message: Message) -> str:
        """Return the digest of the body that the proof is about. Raises HttpError 403, which says no more to a sender
        without the key than a server that has none."""
        try:
            if self._proofs is None:
                raise BadProof(Fault.WRONG, "this server has no cluster key")
            return self._proofs.check(proof, message)
        except BadProof as bad:
            why = f"the proof in {PROOF} does not count: {bad}"
            if bad.fault is Fault.USED:
                raise HttpError(403, why, code="proof_used", type="permission_error") from None
            if bad.fault is Fault.EXPIRED:
                raise HttpError(403, why, code="proof_expired", type="permission_error") from None
            raise refused(
                f"the headers {BOOTSTRAP}* and {PROOF} are for gateways that prove the cluster key for each message"
            ) from None


def _target(scope: Scope) -> str:
    """Return path and query as they were sent."""
    path, query = (scope[name].decode("latin-1") for name in ("raw_path", "query_string"))
    return f"{path}?{query}" if query else path


def refused(why: str) -> HttpError:
    """Return the error of status 403 for a caller whose key does not allow this."""
    return HttpError(403, why, code=KEY_REQUIRED, type="permission_error")
