"""Contents of images from where a request names them: `data:` URLs, and hosts that the operator allows."""

from __future__ import annotations

import base64
import binascii
from typing import Final

_DATA: Final = "data:"
_BASE64: Final = ";base64"
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
    if not begin or not url[: begin - 1].lower().endswith(_BASE64):
        raise Unreadable("has a data URL that is not data:image/...;base64,...: send it so")
    check_bytes((len(url) - begin) * 3 // 4 - url[max(begin, len(url) - 2) :].count("="), max_bytes)
    return begin


def data_of(url: str, max_bytes: int) -> bytes:
    """Return the content of a `data:` URL in base64. Raises Unreadable for one that is too long or no base64."""
    begin = check_data(url, max_bytes)
    try:
        return base64.b64decode(url[begin:], validate=True)
    except (binascii.Error, ValueError) as error:
        raise Unreadable(f"has a data URL whose base64 is broken ({error}): send it without line breaks") from error


def check_bytes(num_bytes: int, max_bytes: int) -> None:
    """Raise Unreadable for too many."""
    if num_bytes > max_bytes:
        raise Unreadable(f"has {num_bytes} bytes or more; at most {max_bytes} are read (--max-image-bytes): shrink it")
