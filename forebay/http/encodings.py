"""Compressed bodies: gzip and deflate by the standard library, zstd by that of Python 3.14 or by backports-zstd."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Final, Protocol

from forebay.base.errors import InvalidRequest
from forebay.http.errors import UNSUPPORTED_ENCODING, HttpError

PIECE_BYTES: Final = 16 << 10
MAX_FRAMES: Final = 64  # of one body; an empty frame has 9 bytes, and each costs a decoder
_MAX_DISTANCE_BITS: Final = 23  # 8 MiB: what a zstd encoder for HTTP may ask of a decoder (RFC 9659)
_GZIP: Final = zlib.MAX_WBITS | 16
_RAW: Final = -zlib.MAX_WBITS


class _Frame(Protocol):
    """A decoder of one gzip member, deflate stream or zstd frame. `unused_data` are the bytes behind its end."""

    @property
    def eof(self) -> bool: ...

    @property
    def needs_input(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Return at most `max_length` bytes. Raises an error of the codec."""


class _Inflater:
    """zlib's decoder, with the input that it has not read yet."""

    def __init__(self, wbits: int) -> None:
        self._inflater = zlib.decompressobj(wbits)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._inflater.eof

    @property
    def unused_data(self) -> bytes:
        return self._inflater.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        """Return at most `max_length` bytes. Raises zlib.error."""
        piece = self._inflater.decompress(self._inflater.unconsumed_tail + data, max_length)
        self.needs_input = len(piece) < max_length
        return piece


def coding_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the content coding of a body, "" for none. Raises HttpError 415 for an unknown one, for several, and for
    zstd if its package is missing."""
    named = b",".join(value for name, value in headers if name == b"content-encoding").decode("latin-1").lower()
    codings = [coding for word in named.split(",") if (coding := word.strip()) not in ("", "identity")]
    if not codings:
        return ""
    coding = codings[0].removeprefix("x-")
    if len(codings) > 1 or coding not in _CODINGS:
        raise _unsupported(f"the content-encoding {', '.join(codings)[:200]!a} is not read")
    if coding == "zstd" and _zstd() is None:
        raise _unsupported("zstd bodies are read once this server has its package (pip install 'forebay[zstd]')")
    return coding


def accepted() -> str:
    """Return the codings that are read, as the header `accept-encoding` lists them."""
    return ", ".join(name for name in _CODINGS if name != "zstd" or _zstd() is not None)


def _unsupported(what: str) -> HttpError:
    return HttpError(415, f"{what}: send one of {accepted()}, or the body as it is", code=UNSUPPORTED_ENCODING)


def decoded(coding: str, content: bytes) -> Iterator[bytes]:
    """Decode a body piece by piece. No piece has more than `PIECE_BYTES`, some are empty, and the next one is not
    decoded before it is asked for. Raises InvalidRequest for a body in another encoding, or one that ends early."""
    make = partial(_CODINGS[coding], content)
    frame, num_frames = make(), 1
    for start in range(0, len(content), PIECE_BYTES):
        data = content[start : start + PIECE_BYTES]
        while data or not (frame.needs_input or frame.eof):
            if frame.eof:
                frame, num_frames = make(), num_frames + 1
                if num_frames > MAX_FRAMES:
                    raise _invalid(coding, f"it has more than {MAX_FRAMES} frames")
            try:
                yield frame.decompress(data, PIECE_BYTES)
            except Exception as error:  # each library has its own kind
                raise _invalid(coding, str(error)[:200]) from error
            data = frame.unused_data
    if not frame.eof:
        raise _invalid(coding, f"it ends early, after {len(content)} bytes")


def _invalid(coding: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"the body is not in the content-encoding {coding}: {why}", code="invalid_content_encoding")


def _inflate(content: bytes) -> _Frame:
    """Make a decoder for `deflate`, which is zlib's format (RFC 9110, 8.4.1.2); some clients leave its header out."""
    has_header = len(content) > 1 and content[0] & 0x0F == zlib.DEFLATED and int.from_bytes(content[:2]) % 31 == 0
    return _Inflater(zlib.MAX_WBITS if has_header else _RAW)


def _zstd() -> Any:
    """Return the module of zstd, None if it is not installed."""
    try:
        from compression import zstd  # type: ignore[import-not-found, unused-ignore]  # Python 3.14
    except ImportError:
        try:
            from backports import zstd  # type: ignore[import-not-found, unused-ignore]
        except ImportError:
            return None
    return zstd


def _unzstd(content: bytes) -> _Frame:
    zstd = _zstd()
    frame: _Frame = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: _MAX_DISTANCE_BITS})
    return frame


_CODINGS: Final[dict[str, Callable[[bytes], _Frame]]] = {
    "gzip": lambda _: _Inflater(_GZIP),
    "deflate": _inflate,
    "zstd": _unzstd,
}
