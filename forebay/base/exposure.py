"""Checks of the clients that can reach an address, and of servers that must not be reachable."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from forebay.base import fault
from forebay.base.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the host; names other than "localhost" are not resolved and count as
    no."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_unspecified(host: str) -> bool:
    """Return whether the host stands for all addresses of its machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def check_exposure(host: str, api_keys: Sequence[object]) -> None:
    """Raise ConfigError if every host on the network could use the server, or reach one with armed fault points."""
    if is_loopback(host):
        return
    if not api_keys:
        raise ConfigError(
            f"--host {host} can be reached from other machines and there is no API key: give --api-key-file FILE, "
            "or listen on 127.0.0.1"
        )
    if fault.is_armed():
        raise ConfigError(
            f"--host {host} can be reached from other machines and faults are armed: unset FOREBAY_FAULTS, "
            "or listen on 127.0.0.1"
        )
