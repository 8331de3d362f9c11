"""Contents of images from where a request names them: `data:` URLs, and hosts that the operator allows."""

from __future__ import annotations

import base64
import binascii
from typing import Final
from urllib.parse import unquote

_DATA: Final = "data:"
_BASE64: Final = ";base64"
_SPACES: Final = " \t\r\n"
_TO_PLAIN: Final = str.maketrans("-_", "+/", _SPACES)
MAX_HEAD: Final = 256  # characters before the data
MAX_SHOWN: Final = 80  # characters of a URL in an error


class Unreadable(Exception):
    """Why: the continuation of a sentence that begins with the image."""


def is_data(url: str) -> bool:
    """Return whether the URL has the content in it."""
    return url[: len(_DATA)].lower() == _DATA


def check_data(url: str, max_bytes: int) -> int:
    """Return where the base64 in a `data:` URL begins. Raises Unreadable for a URL without, or with too much."""
    begin = url.find(",", 0, MAX_HEAD) + 1
    if not begin or not "".join(url[: begin - 1].lower().split()).endswith(_BASE64):
        raise Unreadable("has a data URL that is not data:image/...;base64,...: send it so")
    num_chars = len(url) - begin
    if num_chars * 3 // 4 > max_bytes:
        # An escape may be a line break, too; `data_of` counts again.
        others = sum(url.count(each, begin) for each in f"{_SPACES}=") + 3 * url.count("%", begin)
        check_bytes((num_chars - others) * 3 // 4, max_bytes)
    return begin


def data_of(url: str, max_bytes: int) -> bytes:
    """Return the content of a `data:` URL in base64: of either alphabet (RFC 4648, sections 4 and 5), with or without
    padding, in lines, or escaped as parts of URLs are. Raises Unreadable for one that is too long or no base64."""
    text = url[check_data(url, max_bytes) :]
    try:
        content = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        content = _lenient(text)
    check_bytes(len(content), max_bytes)
    return content


def _lenient(text: str) -> bytes:
    try:
        plain = unquote(text, errors="strict").translate(_TO_PLAIN).rstrip("=")
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise Unreadable(
            f"has a data URL whose base64 is broken ({error}): send A-Z, a-z, 0-9, + and / (or - and _) alone"
        ) from error


def check_bytes(num_bytes: int, max_bytes: int) -> None:
    """Raise Unreadable for too many."""
    if num_bytes > max_bytes:
        raise Unreadable(f"has {num_bytes} bytes or more; at most {max_bytes} are read (--max-image-bytes): shrink it")
