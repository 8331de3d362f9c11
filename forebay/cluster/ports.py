"""Free ports for servers, and the ports on which this node listens."""

from __future__ import annotations

import errno
import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from forebay.base.cpu import PROC
from forebay.base.errors import EngineError
from forebay.cluster.messages import Listener

# Between the ports of Ray's workers (10002 to 19999) and Serve's direct ingress (from 30000 on), which is also below
# the ports that Linux gives to outgoing connections and to Ray's other processes (from 32768 on).
FREE_PORTS: Final = range(20000, 30000)
BACKLOG: Final = 1024
_LISTENS: Final = "0A"
_IPV4_CHARS: Final = 8


def listen_on_free_port(host: str, ports: range = FREE_PORTS) -> socket.socket:
    """Return a socket that listens on a port of `ports`. The first try is random, so that processes that start
    together seldom meet. Raises EngineError if none is free."""
    start = random.randrange(len(ports))
    for i in range(len(ports)):
        try:
            return listen_on(host, ports[(start + i) % len(ports)])
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise EngineError(f"{host} cannot be listened on: {error.strerror}") from None
    raise EngineError(f"no port of {host} is free from {ports.start} to {ports.stop - 1}")


def listen_on(host: str, port: int) -> socket.socket:
    """Return a socket that listens on one port, without blocking. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.create_server((host, port), family=family, backlog=BACKLOG)
    sock.setblocking(False)
    return sock


def listeners(proc: Path = PROC) -> tuple[Listener, ...]:
    """Return the TCP sockets that listen, by port. A process of another user has no name here."""
    names = dict(_owners(proc))
    found = {
        Listener(port=port, address=address, process=names.get(inode, ""))
        for table in ("tcp", "tcp6")
        for address, port, inode in _listening(proc / "net" / table)
    }
    return tuple(sorted(found, key=lambda listener: (listener.port, listener.address)))


def _listening(table: Path) -> Iterator[tuple[str, int, str]]:
    try:
        rows = table.read_text().splitlines()[1:]
    except OSError:
        return
    for row in rows:
        words = row.split()
        if words[3] == _LISTENS:
            address, _, port = words[1].partition(":")
            yield _readable(address), int(port, 16), words[9]


def _readable(address: str) -> str:
    """Return an address of the kernel's table, whose words of 32 bits are in the machine's byte order."""
    data = bytes.fromhex(address)
    if not any(data):
        return "*"
    data = b"".join(data[i : i + 4][::-1] for i in range(0, len(data), 4))
    return socket.inet_ntop(socket.AF_INET if len(address) == _IPV4_CHARS else socket.AF_INET6, data)


def _owners(proc: Path) -> Iterator[tuple[str, str]]:
    for process in proc.iterdir():
        if not process.name.isdigit():
            continue
        try:
            for entry in (process / "fd").iterdir():
                target = os.readlink(entry)
                if target.startswith("socket:["):
                    yield target[len("socket:[") : -1], (process / "comm").read_text().strip()
        except OSError:
            continue
