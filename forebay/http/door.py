"""The end of listening: every connection is answered, and none is reset.

Closing a listening socket resets the connections in its accept queue, and those made between the last `accept` and the
close. A filter in the kernel therefore drops new SYN segments first. A client whose segment is dropped sends another
one after a second, which the closed port refuses.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import socket
import struct
from typing import Any, Final

import uvicorn

from forebay.base.log import event, get_logger

HANDSHAKE_S: Final = 0.1
"""Within which those are in the queue who were asking when the kernel was told."""
_POLL_S: Final = 0.05
_SO_ATTACH_FILTER: Final = 26
_FLAGS_AT, _SYN, _SYN_OR_ACK = 13, 0x02, 0x12
# Classic BPF on a segment's TCP header (RFC 9293, 3.1), as struct sock_filter: code, jump if true, if false, operand.
_NO_FIRST_SEGMENTS: Final = b"".join(
    struct.pack("HBBI", *step)
    for step in (
        (0x30, 0, 0, _FLAGS_AT),  # load a byte
        (0x54, 0, 0, _SYN_OR_ACK),  # and
        (0x15, 0, 1, _SYN),  # is it?
        (0x06, 0, 0, 0),  # drop it
        (0x06, 0, 0, 0xFFFFFFFF),  # take it
    )
)
log = get_logger("server")


async def close_the_door(
    server: uvicorn.Server, sock: socket.socket, grace_s: float, *, stays_open: bool = False
) -> None:
    """Stop accepting connections at `sock`, which `server` listens on and the caller closes. Connections that exist, or
    are in the accept queue, are answered within `grace_s`: after a reset a client does not know that another server may
    take the request. If other processes share the socket it `stays_open`, and new connections wait for them."""
    queue = sock.dup()  # without it the queue would be reset together with the listener
    if not stays_open and _take_no_first_segments(queue):
        await asyncio.sleep(HANDSHAKE_S)
    for listener in server.servers:
        listener.close()
    with queue:
        last = list(iter(lambda: _next_in(queue), None))
    for connection in last:
        await _serve(server, connection)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(_until_answered(server), grace_s)


def _take_no_first_segments(listener: socket.socket) -> bool:
    """Attach the filter. Returns False if the kernel has no such filters: a connection made within the next
    microseconds may then be reset."""
    program = ctypes.create_string_buffer(_NO_FIRST_SEGMENTS)
    size = len(_NO_FIRST_SEGMENTS) // struct.calcsize("HBBI")
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", size, ctypes.addressof(program)))
    except OSError as error:
        log.info(event("door_without_filter", reason=str(error)))
        return False
    return True


def _next_in(queue: socket.socket) -> socket.socket | None:
    try:
        connection, _ = queue.accept()
    except OSError:  # it is empty, or this one is gone already
        return None
    connection.setblocking(False)
    return connection


async def _serve(server: uvicorn.Server, connection: socket.socket) -> None:
    config = server.config
    await asyncio.get_running_loop().connect_accepted_socket(
        lambda: config.http_protocol_class(  # type: ignore[call-arg]
            config=config, server_state=server.server_state, app_state=server.lifespan.state
        ),
        connection,
    )


async def _until_answered(server: uvicorn.Server) -> None:
    while any(map(_waits, server.server_state.connections)):
        await asyncio.sleep(_POLL_S)


def _waits(connection: Any) -> bool:
    """Return whether a connection has not been answered yet, or not its last request."""
    cycle = connection.cycle
    return not connection.transport.is_closing() and (cycle is None or not cycle.response_complete)
