"""A small hub: what of its protocol a client needs to list a repository and to fetch files of it, and its moods."""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", ".gguf", ".bin")  # kept elsewhere, under their sha256


@dataclass
class Hub:
    """`files` are those of every repository. `cut` is after how many bytes the next body that is longer breaks off,
    once. `gated` and `private` repositories want the token. `forged` are bodies that a hostile hub sends instead of the
    files, `etag` is its ETag for all small files, and `listed` are entries that it adds to the list of files."""

    files: dict[str, bytes]
    gated: bool = False
    private: bool = False
    token: str = "hf_canary"
    cut: list[int] = field(default_factory=list)
    asked: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)  # method, path, headers
    forged: dict[str, bytes] = field(default_factory=dict)
    etag: str | None = None
    commit: str = COMMIT
    listed: list[dict[str, Any]] = field(default_factory=list)
    answers: dict[str, bytes] = field(default_factory=dict)  # instead of a JSON answer: "revision" or "tree"

    def __enter__(self) -> Self:
        self._servers = [_Server(self, _Api), _Server(self, _Storage)]  # two origins, as in the field
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self._servers:
            server.close()

    @property
    def url(self) -> str:
        return self._servers[0].url

    @property
    def storage_url(self) -> str:
        return self._servers[1].url

    def fetched(self) -> list[str]:
        """What was sent of large files, from byte to byte."""
        return [headers.get("range", "all") for method, path, headers in self.asked if path.startswith("/blob/")]

    def of_digest(self, digest: str) -> bytes:
        return next(data for data in self.files.values() if hashlib.sha256(data).hexdigest() == digest)


class _Server(ThreadingHTTPServer):
    def __init__(self, hub: Hub, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.hub, self.url = hub, f"http://127.0.0.1:{self.server_address[1]}"
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # which delays a body behind its head by 40 ms
    server: _Server

    def log_message(self, *words: Any) -> None: ...

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.server.hub.asked.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}))
        self.answer(self.server.hub)

    def answer(self, hub: Hub) -> None:
        raise NotImplementedError

    def send(self, status: int, body: bytes, cut: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"content_length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True

    def send_part(self, hub: Hub, data: bytes, **headers: str) -> None:
        """Send the bytes that the request's Range names, or all."""
        begin, end = 0, len(data)
        if wanted := self.headers.get("range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(end, int(last) + 1) if last else end
        cut = hub.cut.pop(0) if hub.cut and len(data) > hub.cut[0] else None
        ranged = {"content_range": f"bytes {begin}-{end - 1}/{len(data)}"} if wanted else {}
        self.send(206 if wanted else 200, data[begin:end], cut, **headers, **ranged)


class _Api(_Handler):
    def answer(self, hub: Hub) -> None:
        known = self.headers.get("authorization") == f"Bearer {hub.token}"
        parts = self.path.partition("?")[0].split("/")[1:]
        of_api = parts[:2] == ["api", "models"]
        repo, rest = ("/".join(parts[2:4]), parts[4:]) if of_api else ("/".join(parts[:2]), parts[2:])
        if repo != "org/name" or (hub.private and not known):
            return self.send(401, b"{}", x_error_code="RepoNotFound")
        if rest[1] not in ("main", "v2", COMMIT):
            return self.send(404, b"{}", x_error_code="RevisionNotFound")
        if of_api and rest[0] in hub.answers:
            return self.send(200, hub.answers[rest[0]])
        if of_api and rest[0] == "revision":
            return self.send(200, json.dumps({"id": repo, "sha": hub.commit, "siblings": []}).encode())
        if of_api:
            return self.send(200, json.dumps([*map(_entry, hub.files, hub.files.values()), *hub.listed]).encode())
        if hub.gated and not known:
            return self.send(403, b"{}", x_error_code="GatedRepo")
        return self._resolve(hub, "/".join(rest[2:]))

    def _resolve(self, hub: Hub, name: str) -> None:
        if name not in hub.files:
            return self.send(404, b"{}", x_error_code="EntryNotFound", x_repo_commit=COMMIT)
        data = hub.files[name]
        if not name.endswith(LARGE):
            etag = hub.etag or _git_hash(data)
            return self.send_part(hub, hub.forged.get(name, data), x_repo_commit=COMMIT, etag=f'"{etag}"')
        digest = hashlib.sha256(data).hexdigest()
        return self.send(
            302,
            b"",
            x_repo_commit=COMMIT,
            location=f"{hub.storage_url}/blob/{digest}",
            x_linked_etag=f'"{digest}"',
            x_linked_size=str(len(data)),
        )


class _Storage(_Handler):
    def answer(self, hub: Hub) -> None:
        digest = self.path.rpartition("/")[2]
        self.send_part(hub, hub.of_digest(digest), etag=f'"{digest}"')


def _git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _entry(name: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": _git_hash(data)}
    if name.endswith(LARGE):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return entry
