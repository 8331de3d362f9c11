"""Files of images as parts of a message."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any, Final

from forebay.base.errors import ConfigError
from forebay.formats.files import read_bytes

MAX_BYTES: Final = 20 << 20  # of a file, as many as a server reads (--max-image-bytes)
_TYPES: Final = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif"}


def image_part(path: Path) -> dict[str, Any]:
    """Read an image as a part of a chat message, with the file in a data: URL.

    Raises ConfigError for a file of another type, and ModelError for one that cannot be read or is too large."""
    content = read_bytes(path, MAX_BYTES)
    url = f"data:image/{_type(path, content)};base64,{base64.b64encode(content).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _type(path: Path, content: bytes) -> str:
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return "webp"
    for magic, name in _TYPES.items():
        if content.startswith(magic):
            return name
    raise ConfigError(f"{path} is no PNG, JPEG, WebP or GIF file: send one of these")
