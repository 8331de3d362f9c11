"""Which prefill server has computed which beginning of a prompt, as far as we know."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Final

import msgspec

from forebay.base.errors import InvalidRequest
from forebay.server.api.messages_request import BILLING_HEADER
from forebay.server.http.bodies import parse_json_object

BLOCK_BYTES: Final = 256  # some 60 tokens: a shorter beginning in common saves less than a balanced load
MOST_BLOCKS: Final = 512  # of one prompt; what is behind them has been cached with them or not at all
MOST_IDS: Final = 1 << 22  # token ids in a body: members have limits of their own
MOST_KNOWN: Final = 1 << 16  # blocks of all prompts together, 10 MB
_DIGEST_BYTES: Final = 16
_PROMPT: Final = ("system", "instructions", "messages", "input", "prompt", "text", "input_ids")  # in their texts' order
_VOLATILE: Final = re.compile(BILLING_HEADER.encode() + rb'[^"\\]*')  # no two requests have the same

_encode: Final = msgspec.json.Encoder().encode


def blocks_of_body(content: bytes) -> list[bytes]:
    """Return `blocks_of` the body of a request; none of a body that a server will refuse."""
    try:
        return blocks_of(parse_json_object(content, MOST_IDS))
    except (InvalidRequest, ValueError, OverflowError):  # a lone surrogate, a number of more than 64 bits
        return []


def blocks_of(data: dict[str, Any]) -> list[bytes]:
    """Return hashes of a prompt's whole blocks, each over all that is before it too."""
    text = b"".join(_VOLATILE.sub(b"", _encode(data[name])) for name in _PROMPT if name in data)
    # The bracket at the end of a list stands where the next message, or id, of a longer one does.
    found, before = [], b""
    for start in range(0, min(len(text) - BLOCK_BYTES, BLOCK_BYTES * MOST_BLOCKS), BLOCK_BYTES):
        before = blake2b(before + text[start : start + BLOCK_BYTES], digest_size=_DIGEST_BYTES).digest()
        found.append(before)
    return found


class Prefixes:
    """A table of bounded size; what nobody has asked for longest goes first."""

    def __init__(self, most: int = MOST_KNOWN) -> None:
        self._most = most
        self._known: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def longest(self, blocks: Sequence[bytes]) -> str | None:
        """Return the member that last had the longest known prefix of this prompt."""
        return next((self._known[block] for block in reversed(blocks) if block in self._known), None)

    def learn(self, blocks: Sequence[bytes], server: str) -> None:
        """Record that `server` has computed these blocks (hashes of prompt beginnings, shortest first); evict old
        ones."""
        for block in reversed(blocks):  # beginnings are asked for by more: they stay longer
            self._known[block] = server
            self._known.move_to_end(block)
        while len(self._known) > self._most:
            self._known.popitem(last=False)

    def forget(self, server: str) -> None:
        """Forget a server, whose cache is gone."""
        for block in [block for block, known in self._known.items() if known == server]:
            del self._known[block]
