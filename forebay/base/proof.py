"""The proof that the sender of one message has the cluster key: a header with an HMAC over the message.

The header has four words with dots between them: the time in ms since 1970, a nonce, the SHA-256 of the body, and the
HMAC-SHA256 with the cluster key of the lines that `signed` returns. It counts for one message, once, for a minute. It
is not the key, and opens no session between engines.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

PROOF: Final = "x-forebay-cluster-proof"
BOOTSTRAP: Final = "x-forebay-bootstrap-"  # followed by host, port or room
VALID_S: Final = 60.0  # that the clocks of two machines may differ by, and a message may take
MOST_NONCES: Final = 1 << 17  # that are remembered: 1,000 messages a second for two minutes
_FORM: Final = re.compile(r"([0-9]{1,15})\.([0-9a-f]{32})\.([0-9a-f]{64})\.([0-9a-f]{64})")
_NAME: Final = "forebay proof 1"


class Fault(StrEnum):
    """The fault of a proof."""

    WRONG = "wrong"  # in its form, its key or its message
    USED = "used"
    EXPIRED = "expired"


class BadProof(Exception):
    """A proof that does not hold for its message."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """The parts that a proof is bound to besides the body: the words of the request's first line, the header Host, and
    the headers of a gateway."""

    method: str
    target: str  # path and query as they are sent
    host: str
    bootstrap: Mapping[str, str] = field(default_factory=dict)  # with whole names in lower case

    def signed(self, time_ms: str, nonce: str, digest: str) -> bytes:
        """Return the lines that the HMAC is of. No word has a line end in HTTP."""
        words = [_NAME, self.method, self.target, self.host, time_ms, nonce, digest]
        return "\n".join([*words, *(f"{name}:{self.bootstrap[name]}" for name in sorted(self.bootstrap))]).encode()


def digest_of(content: bytes) -> str:
    """Return the word of a proof for a body."""
    return hashlib.sha256(content).hexdigest()


def prove(cluster_key: bytes, message: Message, digest: str = digest_of(b""), now_s: float | None = None) -> str:
    """Return the value of the header `PROOF` for one message."""
    words = str(int((time.time() if now_s is None else now_s) * 1000)), secrets.token_hex(16), digest
    return ".".join([*words, _hmac(cluster_key, message.signed(*words))])


class Proofs:
    """Checks proofs, each of which it takes once. `clock` is in seconds since 1970."""

    def __init__(
        self, cluster_key: bytes, clock: Callable[[], float] = time.time, most_nonces: int = MOST_NONCES
    ) -> None:
        self._key, self._clock, self._most_nonces = cluster_key, clock, most_nonces
        self._seen: OrderedDict[str, tuple[float, int]] = OrderedDict()  # by nonce: when it came, and its own time
        # Proofs from before this are not remembered: by an earlier process, or because there were too many.
        self._floor_ms = int(clock() * 1000)

    def check(self, value: str, message: Message) -> str:
        """Return the SHA-256 that the body must have. Raises BadProof."""
        found = _FORM.fullmatch(value)
        if found is None:
            raise BadProof(Fault.WRONG, "it has another form than TIME.NONCE.SHA256.HMAC")
        time_ms, nonce, digest, mac = found.groups()
        if not hmac.compare_digest(mac, _hmac(self._key, message.signed(time_ms, nonce, digest))):
            raise BadProof(Fault.WRONG, "it was made with another key, or for another message")
        now = self._clock()
        late_s = now - int(time_ms) / 1000
        if abs(late_s) > VALID_S:
            raise BadProof(
                Fault.EXPIRED,
                f"its time is {abs(late_s):.0f} s {'behind' if late_s > 0 else 'ahead of'} this machine's, and "
                f"{VALID_S:.0f} s are allowed: set the clocks by NTP",
            )
        self._forget(now)
        if nonce in self._seen or int(time_ms) < self._floor_ms:
            raise BadProof(Fault.USED, "it was used before, or is older than this process: make one for each message")
        self._seen[nonce] = now, int(time_ms)
        return digest

    def _forget(self, now: float) -> None:
        """Drop proofs whose time is over, and the oldest ones if there are too many."""
        while self._seen:
            came, time_ms = next(iter(self._seen.values()))
            if len(self._seen) >= self._most_nonces:
                self._floor_ms = max(self._floor_ms, time_ms + 1)
            elif now - came <= 2 * VALID_S:
                return
            self._seen.popitem(last=False)


def _hmac(key: bytes, message: bytes) -> str:
    return hmac.new(key, message, hashlib.sha256).hexdigest()
