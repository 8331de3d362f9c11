"""Seals: contents that clients keep for the server and can neither read nor change (AES-256-GCM, by cryptography)."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import struct
from typing import Any, Final

from forebay.base.errors import InvalidRequest
from forebay.http.errors import HttpError
from forebay.http.security import Tenant

LIFETIME_S: Final = 7 * 24 * 3600
MAX_BYTES: Final = 256 << 10  # of a content
MAX_SEALED_CHARS: Final = (MAX_BYTES + 256) * 4 // 3 + 64
PREFIX: Final = "forebay.1:"  # the version: another one may have another cipher
_NONCE_BYTES: Final = 12
_EXPIRY: Final = struct.Struct(">Q")


class Seals:
    """Each tenant has a key of its own, derived from the server's secret: no tenant's seal opens for another one."""

    def __init__(self, secret: bytes = b"") -> None:
        """`secret` is the cluster key, whose servers open each other's seals; without one, a seal ends with the
        server."""
        self._secret = secret or secrets.token_bytes(32)

    def seal(self, tenant: Tenant, content: bytes, now: float) -> str:
        """Return a text that `opened` takes back until `LIFETIME_S` are over; `now` is in seconds since 1970. Raises
        HttpError 501 if the package is missing, and 413 for a content of more than `MAX_BYTES`."""
        if len(content) > MAX_BYTES:
            what = f"the summary has {len(content)} bytes; at most {MAX_BYTES} are sealed"
            raise HttpError(413, what, code="seal_too_large")
        expiry, nonce = _EXPIRY.pack(int(now) + LIFETIME_S), secrets.token_bytes(_NONCE_BYTES)
        sealed: bytes = self._cipher(tenant).encrypt(nonce, content, _associated(expiry))
        return PREFIX + base64.urlsafe_b64encode(expiry + nonce + sealed).decode()

    def opened(self, tenant: Tenant, sealed: str, now: float) -> bytes:
        """Return the content of a seal. Raises InvalidRequest (`seal_invalid`, `seal_expired`) for one that this server
        has not made for this tenant, that was changed, or that is too old."""
        parts = _parts(sealed)
        if parts is None:
            raise _invalid()
        expiry, nonce, content = parts
        cipher, error = self._cipher(tenant), _invalid_tag()
        try:
            opened: bytes = cipher.decrypt(nonce, content, _associated(expiry))
        except error:
            raise _invalid() from None
        (until,) = _EXPIRY.unpack(expiry)
        if until <= now:
            what = f"it is older than the {LIFETIME_S // 3600} hours that it may be kept: leave it out"
            raise InvalidRequest(what, code="seal_expired", param="encrypted_content")
        return opened

    def check_available(self) -> None:
        """Raise HttpError 501 if nothing can be sealed."""
        _aead()

    def _cipher(self, tenant: Tenant) -> Any:
        owner = hashlib.sha256(tenant.digest.encode()).digest()
        return _aead().AESGCM(hmac.digest(self._secret, b"seal" + owner, "sha256"))


def _parts(sealed: str) -> tuple[bytes, bytes, bytes] | None:
    """Return the expiry, the nonce and the cipher text; None for a text that is no seal."""
    if not sealed.startswith(PREFIX) or len(sealed) > MAX_SEALED_CHARS:
        return None
    try:
        raw = base64.b64decode(sealed.removeprefix(PREFIX), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    begin = _EXPIRY.size + _NONCE_BYTES
    return (raw[: _EXPIRY.size], raw[_EXPIRY.size : begin], raw[begin:]) if len(raw) > begin else None


def _associated(expiry: bytes) -> bytes:
    """Return the data that is authenticated and not encrypted."""
    return PREFIX.encode() + expiry


def _invalid() -> InvalidRequest:
    what = "it was not made by this server for this API key, or was changed: leave it out"
    return InvalidRequest(what, code="seal_invalid", param="encrypted_content")


def _aead() -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers import aead
    except ImportError:
        what = "compaction needs the package cryptography on this server: pip install 'forebay[compaction]'"
        raise HttpError(501, what, code="compaction_unavailable", type="server_error") from None
    return aead


def _invalid_tag() -> type[Exception]:
    from cryptography.exceptions import InvalidTag

    found: type[Exception] = InvalidTag
    return found
