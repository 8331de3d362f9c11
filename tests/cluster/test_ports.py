"""Free ports, and the ports that are open."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from forebay.base.errors import EngineError
from forebay.cluster.ports import FREE_PORTS, listen_on_free_port, listeners


def test_free_port_is_outside_the_ranges_of_ray_and_serve() -> None:
    with listen_on_free_port("127.0.0.1") as sock:
        port = sock.getsockname()[1]
    assert 19999 < port < 30000
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert FREE_PORTS.stop <= max(low, 30000)


def test_free_port_is_another_while_one_is_taken() -> None:
    with listen_on_free_port("127.0.0.1") as first:
        taken = first.getsockname()[1]
        with listen_on_free_port("127.0.0.1", range(taken, taken + 20)) as second:
            assert second.getsockname()[1] != taken
        with pytest.raises(EngineError, match=f"from {taken} to {taken}"):
            listen_on_free_port("127.0.0.1", range(taken, taken + 1))


def test_address_of_another_machine_is_refused_with_the_reason() -> None:
    with pytest.raises(EngineError, match=r"192\.0\.2\.1 cannot be listened on"):
        listen_on_free_port("192.0.2.1")


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_listeners_name_port_address_and_process(family: socket.AddressFamily, host: str) -> None:
    with socket.create_server((host, 0), family=family) as sock:
        [found] = [each for each in listeners() if each.port == sock.getsockname()[1]]
    assert found.address == host
    assert found.process == Path(f"/proc/{os.getpid()}/comm").read_text().strip()
