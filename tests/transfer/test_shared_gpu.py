"""Caches that go from engine to engine within one GPU's memory (C21, C22)."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from forebay.config.engine_config import CacheTypes, Chaos, DisaggregationMode
from forebay.requests.transfers import Closed, Offered, Send, Tail
from forebay.transfer.session.connection import LocalEngine
from forebay.transfer.transports import shm
from forebay.transfer.wire.faults import Faults
from forebay.transfer.wire.machine import gpu_of, machine
from forebay.transfer.wire.memory import DeviceMemory, _odd_factors
from tests.deadlines import wait_until
from tests.pools.file_driver import FileDriver
from tests.transfer import shared_gpu
from tests.transfer.ends import STEADY, N, assert_ends, code_of
from tests.transfer.pair import EIGHT_BITS, EVERYTHING, half, offer, pair, sent, spans_of, transfer
from tests.transfer.test_losses import Once


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FileDriver:
    return shared_gpu.install(monkeypatch)


@pytest.mark.parametrize("page_sizes", [(4, 4), (4, 16)], ids=str)
@pytest.mark.parametrize("types", [None, EIGHT_BITS], ids=["float32", "int8"])
def test_c21_caches_go_within_a_gpu_and_never_through_the_host(
    gpu: FileDriver, page_sizes: tuple[int, int], types: CacheTypes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("gather", "scatter"):
        monkeypatch.setattr(DeviceMemory, name, None)
    with pair(EVERYTHING, page_sizes=page_sizes, types=types, backend="shm") as (prefill, decode):
        transfer(prefill, decode, 45, in_pages=1)
        transfer(prefill, decode, 33, start=16, seed=5)


def test_c22_prefill_unmaps_decode_s_caches_at_the_end_of_their_session(gpu: FileDriver) -> None:
    with pair(backend="shm", options=STEADY) as (prefill, decode):
        own = set(gpu.mapped)
        transfer(prefill, decode, N)
        assert len(gpu.mapped) > len(own)
        prefill.transfers.weights_changed(None, 1)
        wait_until(lambda: gc.collect() >= 0 and set(gpu.mapped) == own)


@pytest.mark.parametrize("fault", ["drop", "alter"])
def test_c22_a_chunk_that_a_gpu_lost_or_altered_is_found(
    gpu: FileDriver, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pair(backend="shm", options=STEADY) as (prefill, decode):
        transfer(prefill, decode, N)
        [box] = prefill.transfers._data_thread.sender.outboxes.values()
        box.writer._faults = spoiled = Faults(Chaos(**{fault: 1.0}), lambda: 0.0)
        spoiled._random = Once()
        made = sent(prefill, decode, N)
        assert code_of(decode, made.ticket) == "checksum_mismatch"
        for each in (prefill, decode):
            assert_ends(each, made.ticket)
        transfer(prefill, decode, N)


def test_c22_a_word_that_changes_after_it_was_written_is_found(gpu: FileDriver) -> None:
    """The checksum is of what decode's memory holds."""
    with pair(backend="shm", options=STEADY) as (prefill, decode):
        made = offer(prefill, decode, spans_of(decode, N), N)
        decode.transfers.submit(made)
        prefill.wait(Offered, made.ticket)
        copy = DeviceMemory.copy

        def spoiled(memory: DeviceMemory, piece: object, there: DeviceMemory, places: object, staging: object) -> int:
            found = copy(memory, piece, there, places, staging)  # type: ignore[arg-type]
            there._regions["kv"][-1][int(places[-1]), -1] ^= 1  # type: ignore[index]
            return found

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(DeviceMemory, "copy", spoiled)
            tail = Tail(num_tokens=N, token_id=1)
            prefill.transfers.submit(Send(ticket=made.ticket, spans=spans_of(prefill, N), tail=tail))
            assert code_of(decode, made.ticket) == "checksum_mismatch"
            decode.wait(Closed, made.ticket)


def test_a_gpu_s_checksum_has_an_odd_factor_for_each_word() -> None:
    factors = _odd_factors(1000)
    assert (factors & 1).all()
    assert len(set(factors.tolist())) == 1000
    assert factors[:2].tolist() == [-2152535657050944081, 7960286522194355701]


def test_caches_of_two_gpus_are_not_of_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(uuid="one")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    names = {machine(gpu=gpu_of(torch.device(name))) for name in ("cpu", "cuda")}
    found.uuid = "another"
    names.add(machine(gpu=gpu_of(torch.device("cuda"))))
    assert len(names) == 3


def test_a_cache_in_more_files_than_a_message_takes_goes_by_another_transport(
    gpu: FileDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm, "MAX_FILES", 2)
    decode = half(DisaggregationMode.DECODE)
    engine: LocalEngine = decode.transfers._engine
    assert engine.transports == ["tcp"]
    decode.transfers.close()
