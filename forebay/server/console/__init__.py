"""The console page and its assets: plain files, read once, served with headers that let nothing else in.

The page is at `/`, everything it loads under `/console/`. Neither holds anything of the operator's, so both may be
served without a key: the page asks for one when the API answers 401.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import msgspec

from forebay.base.sampling import NUMBERS

# `mimetypes` reads the machine's own tables, and a browser refuses a module with the wrong type.
_MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}

HEADERS: Final = MappingProxyType(
    {
        # Model output is hostile input. No inline code or style, no other origin, and one way only to turn a string
        # into markup: DOMPurify's. What KaTeX styles, it styles through the CSSOM, which needs no leave. Pictures of a
        # message are in data: URLs; none is loaded from another origin.
        "Content-Security-Policy": (
            "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
            "object-src 'none'; require-trusted-types-for 'script'; trusted-types dompurify"
        ),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-cache",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asset:
    """A file of the page in memory, with its media type and ETag."""

    body: bytes
    media_type: str
    etag: str  # quoted, as the header wants it


def load_assets() -> dict[str, Asset]:
    """URL path -> asset: `/` is the page, `/console/<path>` what it loads. A closed set, so no path can escape it.

    `vendor/versions.json` says whose files the page carries, of which version and with which hashes."""
    folder = Path(__file__).parent
    files = {
        "/" if path.name == "index.html" else f"/console/{path.relative_to(folder).as_posix()}": _read(path)
        for path in sorted(folder.rglob("*"))
        if path.suffix in _MEDIA_TYPES
    }
    return {**files, "/console/sampling.js": _sampling()}


def _sampling() -> Asset:
    """The module with the controls of the sampling numbers."""
    controls = [
        {
            "name": name,
            "label": number.label,
            "hint": number.hint,
            "whole": number.is_whole,
            "low": (number.page or (number.least, number.high))[0],
            "high": (number.page or (number.least, number.high))[1],
            "placeholder": "the model's own" if number.gguf else f"{number.default:g}",
        }
        for name, number in NUMBERS.items()
    ]
    return _asset(b"export const NUMBERS = Object.freeze(%b);\n" % msgspec.json.encode(controls), ".js")


def _read(path: Path) -> Asset:
    return _asset(path.read_bytes(), path.suffix)


def _asset(body: bytes, suffix: str) -> Asset:
    return Asset(
        body=body,
        media_type=_MEDIA_TYPES[suffix],
        etag=f'"{hashlib.sha256(body).hexdigest()[:32]}"',
    )
