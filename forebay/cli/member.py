"""One server of `forebay serve --pd`: `python -m forebay.cli.member LISTENING LEASE WORDS...`, with the descriptors of
a socket that listens and of a pipe that ends with the parent process."""

from __future__ import annotations

import os
import socket
import sys
import threading
from typing import NoReturn

from forebay.cli.commands import guarded
from forebay.cli.serve import parse
from forebay.engine.lifecycle.spawn import spawn


def end_with(lease: int) -> None:
    """End this process when the pipe with this descriptor closes, whose other end the parent has."""

    def watch() -> None:
        os.read(lease, 1)  # nothing is ever written
        os._exit(1)

    threading.Thread(target=watch, name="lease", daemon=True).start()


def main() -> NoReturn:
    """Serve on the inherited listening socket until the lease (a pipe of the parent) closes."""
    listening, lease, *words = sys.argv[1:]
    end_with(int(lease))
    spawned = spawn()

    def serve() -> int:
        from forebay.cli.serving import serve_from

        return serve_from(parse(words), spawned, socket.socket(fileno=int(listening)))

    code = guarded(serve)
    spawned.discard()
    sys.exit(code)


if __name__ == "__main__":
    main()
