"""The bytes of each token: the table that detokenization concatenates.

Text is the concatenation of the bytes of its tokens, decoded as UTF-8 with U+FFFD for invalid bytes. That makes
streaming exact by construction: no context, no re-decoding of a window.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Final, Protocol

_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class PieceReader(Protocol):
    """Convert a vocabulary's spelling of a token to its bytes."""

    def __call__(self, piece: str) -> bytes: ...


def _byte_level_alphabet() -> dict[int, int]:
    """Return GPT-2's printable substitutes: the byte of each substitute's code point."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: byte for byte in printable}
    others = [byte for byte in range(256) if byte not in table]
    table.update({0x100 + i: byte for i, byte in enumerate(others)})
    return table


_ALPHABET: Final = _byte_level_alphabet()


def byte_level(piece: str) -> bytes:
    """A piece of a byte-level BPE vocabulary, such as `Ġthe`."""
    try:
        return piece.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:  # a word added in plain spelling
        return piece.encode()


def sentencepiece(piece: str) -> bytes:
    """A piece of a SentencePiece vocabulary, such as `▁the` or `<0x0A>`."""
    match = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else piece.replace("▁", " ").encode()


def wordpiece(piece: str) -> bytes:
    """A piece of a WordPiece vocabulary: `##ing` continues a word, and `the` begins one behind a space."""
    return piece.removeprefix("##").encode() if piece.startswith("##") else f" {piece}".encode()


class TokenBytes:
    """id -> bytes, filled as ids are met. `skipped` ids (control tokens) have no bytes in a text."""

    def __init__(self, pieces: Sequence[str], reader: PieceReader, literal: set[int], skipped: set[int]) -> None:
        """`pieces` by id, "" for one without. `literal` ids are spelled as they are: added tokens are no pieces of the
        vocabulary's alphabet."""
        self._pieces = pieces
        self._reader = reader
        self._literal = literal
        self.skipped = skipped
        self._known: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}
        self._added: dict[str, int] | None = None

    def __len__(self) -> int:
        return len(self._pieces)

    def spelled(self, token: int) -> bytes:
        """The bytes of any token, a control token's spelling included. An id that the checkpoint pads its vocabulary
        with has none."""
        known = self._known.get(token)
        if known is None:
            if token >= len(self._pieces):
                return b""
            known = self._known[token] = self._read(token, self._pieces[token])
        return known

    def spellings(self) -> list[bytes]:
        """The bytes of all tokens: of a vocabulary to be kept elsewhere, which need not be kept here as well."""
        return [self._read(token, piece) for token, piece in enumerate(self._pieces)]

    def forget(self) -> None:
        """Drop the bytes that are cached; they are read again."""
        self._known.clear()
        self._texts.clear()

    def _read(self, token: int, piece: str) -> bytes:
        return piece.encode() if token in self._literal else self._reader(piece)

    def added(self, spelling: str) -> int | None:
        """The token that has been added to the vocabulary as this word."""
        if self._added is None:
            tokens = sorted(self._literal | self.skipped, reverse=True)
            self._added = {self._pieces[token]: token for token in tokens}
        return self._added.get(spelling)

    def showing(self, spellings: Collection[str]) -> TokenBytes:
        """Return a copy that shows the control tokens that are spelled so in the text."""
        wanted = {word.encode() for word in spellings}
        shown = {token for token in self.skipped if self.spelled(token) in wanted}
        return TokenBytes(self._pieces, self._reader, self._literal, self.skipped - shown) if shown else self

    def in_text(self, token: int) -> bytes:
        """Return the token's bytes; empty for control tokens that outputs leave out."""
        return b"" if token in self.skipped else self.spelled(token)

    def text(self, token: int) -> str | None:
        """`in_text` as text, or None where these bytes are no whole characters by themselves."""
        try:
            return self._texts[token]
        except KeyError:
            pass
        try:
            text = self.in_text(token).decode()
        except UnicodeDecodeError:
            text = None
        self._texts[token] = text
        return text
