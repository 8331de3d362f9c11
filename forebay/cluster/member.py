"""The process of one actor. Its arguments are a kind (`serve` or `route`), surroundings as JSON, the descriptors of a
socket that listens and of a pipe, and the words of the command.

It undoes what Ray did to it and becomes that server or router, on the socket. It ends when the pipe closes, which the
actor holds."""

from __future__ import annotations

import socket
import sys
from typing import NoReturn

from forebay.cluster.surroundings import read_surroundings, restore


def main() -> NoReturn:
    """Serve or route on the inherited socket until a signal or the end of the actor."""
    kind, surroundings, listening, lease, *words = sys.argv[1:]
    restore(read_surroundings(surroundings))
    if kind == "serve":
        from forebay.cli import member

        sys.argv[1:] = [listening, lease, *words]
        member.main()
    from forebay.cli.commands import guarded
    from forebay.cli.member import end_with
    from forebay.cli.route import run

    end_with(int(lease))
    sys.exit(guarded(lambda: run(words, socket.socket(fileno=int(listening)))))


if __name__ == "__main__":
    main()
