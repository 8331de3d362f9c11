"""The page at `/` and its files: read once at start-up, so that no request can name a file."""

from __future__ import annotations

import mimetypes
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from starlette.responses import Response

CONSOLE: Final = Path(__file__).parent / "console"
_TYPES: Final = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True, slots=True)
class ConsoleFiles:
    """By path of the URL: `/` is index.html, everything else is below `/console/`."""

    files: dict[str, tuple[bytes, str]]

    @classmethod
    def load(cls, folder: Path = CONSOLE) -> ConsoleFiles:
        files: dict[str, tuple[bytes, str]] = {}
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.suffix not in (".py", ".pyc"):
                kind = _TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
                files[f"/console/{path.relative_to(folder).as_posix()}"] = (path.read_bytes(), kind)
        if "/console/index.html" in files:
            files["/"] = files["/console/index.html"]
        return cls(files)

    @property
    def paths(self) -> frozenset[str]:
        return frozenset(self.files)

    def response(self, path: str) -> Response:
        content, kind = self.files[path]
        headers = {"content-security-policy": _POLICY, "referrer-policy": "no-referrer", "cache-control": "no-cache"}
        return Response(content, media_type=kind, headers=headers)
