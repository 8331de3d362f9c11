"""From a request's tokens to its text, piece by piece, so that the pieces joined are the whole text, always."""

from __future__ import annotations

import codecs
from typing import Final, NamedTuple

from forebay.text.stop_patterns import PatternSearch
from forebay.text.token_bytes import TokenBytes

_UTF8: Final = codecs.getincrementaldecoder("utf-8")


class Delta(NamedTuple):
    """`text` may be shown now. `stopped` is the stop string or pattern that has just been met: everything from it on is
    dropped and nothing more may be pushed. `used` tokens of those pushed went into the text."""

    text: str
    stopped: str | None
    used: int


class Detokenizer:
    """One request's text. Never shows half a character, nor a stop string, what matches a pattern to stop at, or the
    beginning of one."""

    __slots__ = (
        "_decoder",
        "_held",
        "_include_stop",
        "_is_open",
        "_longest",
        "_min_tokens",
        "_patterns",
        "_stop",
        "_table",
        "num_chars",
        "offsets",
    )

    def __init__(
        self,
        table: TokenBytes,
        stop: tuple[str, ...] = (),
        *,
        patterns: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """`include_stop` leaves the stop string itself at the end of the text. `patterns` as in `stop_patterns`. No
        stop string counts that ends in the text of the first `min_tokens` tokens; patterns are looked for behind it.
        """
        self._table = table
        self._stop = stop
        self._patterns = {pattern: PatternSearch(pattern) for pattern in patterns}
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._longest = max(map(len, stop), default=0)
        self._decoder = _UTF8("replace")
        self._is_open = False  # the decoder holds a part of a character
        self._held = ""  # decoded, not shown: may become what stops
        self.num_chars = 0  # shown
        self.offsets: list[int] = []  # per pushed token: characters of text before it

    @property
    def num_decoded(self) -> int:
        """Characters that are shown, or held back."""
        return self.num_chars + len(self._held)

    def push(self, token_ids: list[int]) -> Delta:
        """Decode tokens up to the first stop string; text that may begin a stop string is held back."""
        if not (self._stop or self._patterns):
            return Delta("".join(map(self.push_token, token_ids)), None, len(token_ids))
        shown = ""
        for used, token in enumerate(token_ids, 1):
            self.offsets.append(self.num_chars + len(shown) + len(self._held))
            new = self._decoder.decode(self._table.in_text(token))
            if not new:
                continue
            text, stopped = self._search(new)
            shown += text
            if stopped is not None:
                self.num_chars += len(shown)
                return Delta(shown, stopped, used)
        self.num_chars += len(shown)
        return Delta(shown, None, len(token_ids))

    def push_token(self, token: int) -> str:
        """The text that one more token adds where no stop strings are looked for: as `push` of it, in less time."""
        self.offsets.append(self.num_chars)
        text = None if self._is_open else self._table.text(token)
        if text is None:
            text = self._decoder.decode(self._table.in_text(token))
            self._is_open = bool(self._decoder.getstate()[0])
        self.num_chars += len(text)
        return text

    def finish(self) -> Delta:
        """Return the text that was held back: half a character becomes U+FFFD, the beginning of a stop string is text
        after all."""
        tail = self._decoder.decode(b"", True)
        text, stopped = self._search(tail) if tail else ("", None)
        if stopped is None:
            text, self._held = text + self._held, ""
        self.num_chars += len(text)
        return Delta(text, stopped, 0)

    def _search(self, new: str) -> tuple[str, str | None]:
        """Add `new` to the held text. Return the text that may be shown and the stop string that begins first in it."""
        text = self._held + new
        if len(self.offsets) <= self._min_tokens:
            return self._show(text, self._held_back(text))
        at, end, found = len(text), 0, None
        for stop in self._stop:
            place = text.find(stop, 0, at + len(stop) - 1)
            if 0 <= place < at:
                at, end, found = place, place + len(stop), stop
        for pattern, search in self._patterns.items():
            first = search.position - len(self._held)
            match = search.push(new)
            if match is not None and match[0] - first < at:
                at, end, found = match[0] - first, match[1] - first, pattern
        if found is not None:
            self._held = ""
            return text[:end] if self._include_stop else text[:at], found
        return self._show(text, max((self._held_back(text), *(search.held for search in self._patterns.values()))))

    def _show(self, text: str, keep: int) -> tuple[str, None]:
        """All but the last `keep` characters, which are held."""
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def _held_back(self, text: str) -> int:
        """Length of the longest end of `text` that some stop string begins with."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-size:]
            if any(stop.startswith(end) for stop in self._stop):
                return size
        return 0


def decode(table: TokenBytes, token_ids: list[int], *, skip_special: bool = True) -> str:
    """The whole text at once."""
    read = table.in_text if skip_special else table.spelled
    return b"".join(map(read, token_ids)).decode("utf-8", "replace")
