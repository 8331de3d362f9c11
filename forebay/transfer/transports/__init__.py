"""Transports of chunks: a module each, found by its name and imported only if it is chosen.

The names are those of `TransferBackend`, which command line and configuration read without these modules. Each module
declares a `Transport` as `TRANSPORT`; a library that it needs is imported at its top.
"""

from __future__ import annotations

import importlib
from typing import Final

from forebay.base.errors import ConfigError
from forebay.config.engine_config import TransferBackend
from forebay.transfer.wire.memory import FLAG, Endpoint, OneSided, Place, Transport

AUTO: Final = (TransferBackend.SHM, TransferBackend.TCP)  # best first


def transports_of(backend: TransferBackend) -> dict[str, Transport]:
    """Return the transports that a value of the flag names, by name, best first. Raises ConfigError if the library of
    one is not installed."""
    names = AUTO if backend is TransferBackend.AUTO else (backend,)
    return {name.value: importlib.import_module(f"{__name__}.{name.value}").TRANSPORT for name in names}


def open_transports(endpoint: Endpoint, place: Place | None) -> dict[str, OneSided | None]:
    """Return this engine's ends of the transports that its options name, best first; see `Transport.open`.

    Raises ConfigError if the only one that is named cannot be used here.
    """
    backend = endpoint.options.transfer_backend
    opened: dict[str, OneSided | None] = {}
    for name, transport in transports_of(backend).items():
        reason = transport.unfit(endpoint, place)
        if not reason:
            opened[name] = transport.open(endpoint, place)
        elif backend is not TransferBackend.AUTO:
            raise ConfigError(f"{FLAG} {name}: {reason}")
    return opened


def maps_caches(backend: TransferBackend) -> bool:
    """Return whether decode's caches must be allocated in memory that another process can map."""
    return any(transport.maps_caches for transport in transports_of(backend).values())
