"""A server that starts at once: `fake_server.py KIND SURROUNDINGS LISTENING LEASE WORDS...`, as `member.py` is called.

`--exit=N` ends it at once, `--ends-at-first` the first process only (a file of that name is the mark).
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    version = 0

    def answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.answer(200, {"weight_version": str(Handler.version)} if self.path == "/server_info" else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["model_path"] == "/nowhere":
            self.answer(400, {"error": {"message": "there is nothing"}})
            return
        Handler.version += 1
        self.answer(200, {})

    def log_message(self, *_: object) -> None:
        return


def main() -> None:
    listening, lease, *words = sys.argv[3:]
    print("started with", *words, flush=True)
    for word in words:
        name, _, value = word.partition("=")
        if name == "--exit":
            sys.exit(int(value))
        if name == "--ends-at-first" and not Path(value).exists():
            Path(value).touch()
            sys.exit(3)

    def watch() -> None:
        os.read(int(lease), 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    server = HTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = socket.socket(fileno=int(listening))
    server.socket.setblocking(True)
    server.serve_forever()


if __name__ == "__main__":
    main()
