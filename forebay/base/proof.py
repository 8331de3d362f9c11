"""The proof that a sender has the cluster key: a header with an HMAC of the key, which opens no session by itself."""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

PROOF: Final = "x-forebay-cluster-proof"
BOOTSTRAP: Final = "x-forebay-bootstrap-"  # followed by host, port or room


def proof_of(cluster_key: bytes) -> str:
    """Return the value of the header `PROOF`."""
    return hmac.new(cluster_key, b"forebay gateway", hashlib.sha256).hexdigest()
