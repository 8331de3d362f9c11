"""Headers between servers of one cluster, and the proof that a request comes from a holder of the cluster key.

A gateway says in headers where the two halves of a request meet, so that it forwards the client's body unchanged. It
proves that it has the cluster key with an HMAC of the key, which is worth nothing on the port of transfers. Without the
proof these headers are refused: they make a decode server connect to a host (SSRF).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from forebay.config.disaggregation import peer_address
from forebay.config.engine_config import ServerConfig
from forebay.server.http.errors import HttpError

PROOF: Final = "x-forebay-cluster-proof"
BOOTSTRAP: Final = "x-forebay-bootstrap-"  # followed by host, port or room
NAMES: Final = ("room", "host", "port")
KEY_REQUIRED: Final = "cluster_key_required"

Headers = Sequence[tuple[bytes, bytes]]


def proof_of(cluster_key: bytes) -> str:
    """The value of the header `PROOF`."""
    return hmac.new(cluster_key, b"forebay gateway", hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True)
class Sender:
    """The sender of a request by its headers. `is_gateway`: it has the cluster key, or needs none. `bootstrap` are its
    own words about the other half, by name (`NAMES`)."""

    is_gateway: bool = False
    bootstrap: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


class Cluster:
    """Decides from the configuration who may say where a prefill server is, and which servers may be named."""

    def __init__(self, config: ServerConfig) -> None:
        self._proof = proof_of(config.cluster_key).encode() if config.cluster_key else b""
        self._trusts_all = config.insecure_no_cluster_key and not config.cluster_key
        self._prefill_servers = frozenset(map(peer_address, config.prefill_servers))

    @property
    def has_configured_servers(self) -> bool:
        return bool(self._prefill_servers)

    def is_configured(self, host: str, port: int) -> bool:
        """Whether the operator has named this prefill server."""
        return (host.lower(), port) in self._prefill_servers

    def sender(self, headers: Headers) -> Sender:
        """Raises HttpError 403 for headers of gateways without the right proof, and 400 for one that comes twice."""
        ours = [(name.decode("latin-1"), value) for name, value in headers if _is_ours(name)]
        if not ours:
            return Sender(self._trusts_all)
        found = dict(ours)
        if len(found) != len(ours):
            raise HttpError(400, f"a header {BOOTSTRAP}* or {PROOF} occurs twice", code="invalid_header")
        if not (self._trusts_all or self._is_right(found.get(PROOF, b""))):
            raise refused(f"the headers {BOOTSTRAP}* and {PROOF} are for gateways that have the cluster key")
        words = {name: found.get(BOOTSTRAP + name) for name in NAMES}
        unknown = found.keys() - {PROOF, *(BOOTSTRAP + name for name in NAMES)}
        if unknown:
            raise HttpError(400, f"{min(unknown)[:64]!a} is no header of a gateway", code="invalid_header")
        return Sender(True, {name: word.decode("latin-1") for name, word in words.items() if word is not None})

    def _is_right(self, proof: bytes) -> bool:
        return bool(self._proof) and hmac.compare_digest(proof, self._proof)


def _is_ours(name: bytes) -> bool:
    return name == PROOF.encode() or name.startswith(BOOTSTRAP.encode())


def refused(why: str) -> HttpError:
    return HttpError(403, why, code=KEY_REQUIRED, type="permission_error")
