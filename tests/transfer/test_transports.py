"""Transports: each is declared in a file of its own, which is imported if the transport is chosen."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from dataclasses import replace

import pytest

from forebay.base.errors import ConfigError
from forebay.config.engine_config import DisaggregationMode, TransferBackend
from forebay.pools.cache_pool import CachePool
from forebay.transfer import transports
from forebay.transfer.transports import maps_caches, transports_of
from forebay.transfer.worker import transfers_of
from tests.transfer.pair import OPTIONS, half, layout_of

NAMES = [backend for backend in TransferBackend if backend is not TransferBackend.AUTO]


def test_transports_have_a_file_for_each_name_and_a_name_for_each_file() -> None:
    files = {module.name for module in pkgutil.iter_modules(transports.__path__)}
    assert files == {name.value for name in NAMES}


@pytest.mark.slow
def test_transports_libraries_are_imported_only_if_chosen() -> None:
    """One process chooses each in turn, those that need a library last. After the last one there is none to import."""
    libraries = [TransferBackend.NIXL, TransferBackend.MOONCAKE]
    order = [*(backend for backend in TransferBackend if backend not in libraries), libraries[0]]
    code = (
        "import contextlib, sys\n"
        "from forebay.base.errors import ConfigError\n"
        "from forebay.config.engine_config import TransferBackend\n"
        "from forebay.transfer import transports\n"
        f"for backend in {[backend.value for backend in order]}:\n"
        "    with contextlib.suppress(ConfigError):\n"  # the library may be missing
        "        transports.transports_of(TransferBackend(backend))\n"
        "    print(*(name for name in sys.modules if name.startswith('forebay.transfer.transports.')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    chosen = set()
    for backend, line in zip(order, done.stdout.splitlines(), strict=True):
        chosen.add(backend)
        imported = {name.rpartition(".")[2] for name in line.split()}
        assert imported & set(libraries) <= chosen, backend


def without_maps(mode: DisaggregationMode, backend: TransferBackend) -> list[str]:
    """Return the transports of an engine whose cache no other process can map."""
    cache: CachePool = half(DisaggregationMode.DECODE, backend="tcp").cache
    options = replace(OPTIONS, mode=mode, transfer_backend=backend)
    transfers = transfers_of(options, cache, layout_of(cache), None)
    transfers.close()
    return transfers._engine.transports


def test_transports_decode_whose_cache_cannot_be_mapped_has_no_shared_memory() -> None:
    assert without_maps(DisaggregationMode.DECODE, TransferBackend.AUTO) == ["tcp"]
    assert without_maps(DisaggregationMode.PREFILL, TransferBackend.AUTO) == ["shm", "tcp"]
    with pytest.raises(ConfigError, match="--disaggregation-transfer-backend shm: the cache is not in memory that"):
        without_maps(DisaggregationMode.DECODE, TransferBackend.SHM)


def test_transports_auto_prefers_the_first_that_fits() -> None:
    assert [*transports_of(TransferBackend.AUTO)] == ["shm", "tcp"]
    assert maps_caches(TransferBackend.AUTO)
    assert not maps_caches(TransferBackend.TCP)


@pytest.mark.parametrize(("name", "one_machine"), [("shm", True), ("tcp", False), ("nixl", False), ("mooncake", False)])
def test_transports_that_reach_other_machines_may_be_used_there(name: str, one_machine: bool) -> None:
    made = half(DisaggregationMode.DECODE, backend=name)
    engine = made.transfers._engine
    assert engine.may_use(name, engine.machine)
    assert engine.may_use(name, "another machine") is not one_machine
    made.transfers.close()
