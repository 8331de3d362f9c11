"""Settings of images in requests: flags, and their values."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from forebay.base.errors import ConfigError
from forebay.base.units import parse_count
from forebay.config.flag import BYTES, LIST, Decision, Flag, Kind

BODY_BYTES: Final = 4 << 20  # of a request of a model without an encoder
BODY_BYTES_WITH_IMAGES: Final = 32 << 20
MOST_IMAGES: Final = 256  # of a prompt: a message has no more parts


def _parse_limit(text: str) -> int:
    """Read image=N, or the JSON object that vLLM takes. Limits of other media have no effect: none are served."""
    try:
        given = json.loads(text) if text.lstrip().startswith("{") else _pairs(text)
        counts = {str(kind): parse_count(str(count)) for kind, count in given.items()}
    except (ValueError, AttributeError, RecursionError):
        raise ConfigError(f"{text[:200]!r} is not image=N") from None
    return counts.get("image", DEFAULT_IMAGES)


def _pairs(text: str) -> dict[str, str]:
    pairs = (pair.partition("=") for pair in text.split(","))
    return {kind.strip(): count for kind, _, count in pairs}


PER_PROMPT: Final = Kind("image=N", _parse_limit, int)
DEFAULT_IMAGES: Final = 8
DEFAULT_BYTES: Final = 20 << 20

SECURITY_FLAGS: Final = (
    Flag(
        "allowed_media_domains",
        LIST,
        "hosts from which the server fetches the images that requests name by http: and https: URLs, HOST or "
        "HOST:PORT; without one from nowhere: images are then sent as data: URLs",
        default=(),
        aliases=("--allowed-media-domain",),
    ),
)
LIMIT_FLAGS: Final = (
    Flag("max_image_bytes", BYTES, "largest file of an image", default=DEFAULT_BYTES, low=1024, high=64 << 20),
    Flag(
        "limit_mm_per_prompt",
        PER_PROMPT,
        "most images of one prompt",
        default=DEFAULT_IMAGES,
        low=0,
        high=MOST_IMAGES,
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaOptions:
    """From which hosts images are fetched, how large a file may be, and how many a prompt may have."""

    allowed_media_domains: tuple[str, ...] = ()
    max_image_bytes: int = DEFAULT_BYTES
    limit_mm_per_prompt: int = DEFAULT_IMAGES


def max_body_bytes(accepts_images: bool) -> Decision:
    """Choose the largest body of a request."""
    if accepts_images:
        return Decision(BODY_BYTES_WITH_IMAGES, "the model accepts images")
    return Decision(BODY_BYTES, "texts of the longest contexts")
