"""The tokenizer of the package `tokenizers`, in memory while it is used."""

from __future__ import annotations

import threading
import zlib

import tokenizers

from forebay.base.heap import give_back_freed_memory


class Backend:
    """A tokenizer, and a copy of it to which control spellings are text. Thread-safe.

    That of 50,000 tokens takes 8 MiB, its copy as much, and what `rest` leaves of them 0.7. It is made again in 0.1 s,
    in which no other thread gets on either way: the package holds the interpreter's lock. So one and the same thread
    should `rest` it and make it; what others have freed, the C library gives back in part.
    """

    def __init__(self, whole: tokenizers.Tokenizer) -> None:
        self._lock = threading.Lock()  # of making one
        self._whole: tokenizers.Tokenizer | None = whole
        self._literal: tokenizers.Tokenizer | None = None
        self._packed = b""  # once it has rested, for good

    @property
    def has_literal(self) -> bool:
        return self._literal is not None

    def whole(self) -> tokenizers.Tokenizer:
        """Return the tokenizer, unpacked and parsed if it is not in memory; safe from several threads."""
        if (whole := self._whole) is None:
            with self._lock:
                if (whole := self._whole) is None:
                    whole = self._whole = _read(zlib.decompress(self._packed))
        return whole

    def literal(self) -> tokenizers.Tokenizer:
        """A copy, made at its first use. The tokenizer's own switch would wait until no encoding runs, and block the
        event loop meanwhile."""
        if (literal := self._literal) is None:
            whole = self.whole()
            with self._lock:
                if (literal := self._literal) is None:
                    literal = _read(whole.to_str().encode())
                    literal.encode_special_tokens = True
                    self._literal = literal
        return literal

    def release_memory(self) -> None:
        """Free both tokenizers. The next use makes one again, from the copy in memory, because the file may have
        changed."""
        with self._lock:
            if self._whole is not None and not self._packed:
                self._packed = zlib.compress(self._whole.to_str().encode(), level=1)
            self._whole = self._literal = None
        give_back_freed_memory()


def _read(json: bytes) -> tokenizers.Tokenizer:
    read = tokenizers.Tokenizer.from_buffer(json)
    give_back_freed_memory()  # twenty times the size of the JSON, which it takes meanwhile
    return read
