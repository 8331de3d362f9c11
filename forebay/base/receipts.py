"""The digest of a receipt, for servers that write receipts and for programs that check them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

FORMAT: Final = 1
_DIGEST_BYTES: Final = 16


def digest_of(receipt: Mapping[str, Any]) -> str:
    """Return the digest of a receipt's fields, its own left out."""
    own = {name: value for name, value in receipt.items() if name != "digest"}
    return digest(json.dumps(own, sort_keys=True).encode())


def digest(data: bytes) -> str:
    """Return the digest of any part of a receipt, in hex digits."""
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).hexdigest()
