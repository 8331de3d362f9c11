"""C22: transports over a library: what its refusals and failures become."""

from __future__ import annotations

import importlib
import logging
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from forebay.base.errors import ConfigError
from forebay.config.engine_config import DisaggregationMode
from forebay.requests.transfers import Closed
from tests.transfer import fake_libraries
from tests.transfer.ends import STEADY, N, code_of, failure_of
from tests.transfer.fake_libraries import TransferEngine, nixlAgent
from tests.transfer.pair import half, pair, sent

TRANSPORTS = {"mooncake": "mooncake.engine", "nixl": "nixl_cu12._bindings"}


@pytest.fixture(autouse=True)
def _fakes() -> Iterator[None]:
    """Let both transports run over the fake libraries, also where the real ones are installed."""
    transports = {f"forebay.transfer.transports.{name}": module for name, module in TRANSPORTS.items()}
    before = {name: sys.modules.pop(name, None) for name in transports}
    real = {name: sys.modules.get(name) for name in transports.values()}
    for module in transports.values():
        fake_libraries.install(module)
    yield
    for name, module in (before | real).items():
        if module is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = module


def mooncake() -> ModuleType:
    return importlib.import_module("forebay.transfer.transports.mooncake")


@pytest.mark.parametrize(
    ("call", "what"), [("initialize", "start"), ("batch_register_memory", "register the caches")], ids=str
)
def test_mooncake_library_that_refuses_ends_the_start_with_its_code(
    call: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TransferEngine, call, lambda *_: -7)
    with pytest.raises(ConfigError, match=f"--disaggregation-transfer-backend mooncake: .*cannot {what}: error -7"):
        half(DisaggregationMode.PREFILL, backend="mooncake")


@pytest.mark.parametrize(("devices", "protocol"), [((), "tcp"), (("mlx5_0",), "rdma"), (None, "tcp")], ids=str)
def test_mooncake_uses_rdma_if_the_machine_has_a_device(
    devices: tuple[str, ...] | None,
    protocol: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="forebay")
    chosen: list[str] = []
    begin = TransferEngine.initialize
    monkeypatch.setattr(TransferEngine, "initialize", lambda *a: chosen.append(a[3]) or begin(*a))
    monkeypatch.setattr(mooncake(), "_RDMA_DEVICES", tmp_path if devices is not None else tmp_path / "none")
    for device in devices or ():
        (tmp_path / device).mkdir()
    half(DisaggregationMode.PREFILL, backend="mooncake").transfers.close()
    assert chosen == [protocol]
    (line,) = [line for line in caplog.messages if line.startswith("mooncake ")]
    assert f" protocol={protocol} " in line


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_mooncake_host_that_is_every_address_becomes_this_machines(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", {socket.gethostname(): "192.0.2.7"}.__getitem__)
    assert mooncake()._address(host) == "192.0.2.7"
    assert [mooncake()._address(name) for name in ("127.0.0.1", "a-host")] == ["127.0.0.1", "a-host"]


def test_mooncake_write_that_failed_leaves_the_places_open_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of it may come yet."""
    with pair(backend="mooncake", options=STEADY) as (prefill, decode):
        monkeypatch.setattr(TransferEngine, "transfer_check_status", lambda *_: -1)
        made = sent(prefill, decode, N)
        assert code_of(decode, made.ticket)
        decode.take_updates()
        assert "Closed" not in decode.by_ticket[made.ticket.nonce]
        assert decode.transfers.num_unfenced == 1


@pytest.mark.parametrize("num_accepted", [0, 1])
@pytest.mark.parametrize("refusal", [-1, 2**64 - 1], ids=str)
def test_mooncake_refused_write_leaves_the_places_open_if_an_earlier_one_is_under_way(
    num_accepted: int, refusal: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, calls = TransferEngine.transfer_submit_write, []

    def refuse(engine: TransferEngine, *write: object) -> int:
        calls.append(write)
        return submit(engine, *write) if len(calls) <= num_accepted else refusal  # type: ignore[arg-type]

    with pair(backend="mooncake", options=STEADY) as (prefill, decode):
        monkeypatch.setattr(TransferEngine, "transfer_submit_write", refuse)
        made = sent(prefill, decode, N)
        assert code_of(decode, made.ticket)
        if num_accepted == 0:
            decode.wait(Closed, made.ticket)
        assert decode.transfers.num_unfenced == num_accepted


def test_nixl_write_that_ends_with_another_status_breaks_the_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    with pair(backend="nixl", options=STEADY) as (prefill, decode):
        monkeypatch.setattr(nixlAgent, "getXferStatus", lambda *_: -3)
        made = sent(prefill, decode, N)
        assert "NIXL ended a write with -3" in failure_of(prefill, made.ticket).message
        assert code_of(decode, made.ticket)


def test_nixl_write_that_lands_behind_every_timeout_finds_its_places_still_reserved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    status, lands = nixlAgent.getXferStatus, threading.Event()
    monkeypatch.setattr(nixlAgent, "getXferStatus", lambda *a: status(*a) if lands.is_set() else 1)
    with pair(backend="nixl", options=replace(STEADY, lease_s=0.5)) as (prefill, decode):
        made = sent(prefill, decode, N)
        assert code_of(decode, made.ticket) == "lease_timeout"
        assert code_of(prefill, made.ticket) == "lease_timeout"
        for half in (prefill, decode):
            half.take_updates()
            assert "Closed" not in half.by_ticket[made.ticket.nonce]
        before = decode.bytes_of("kv", made.spans["kv"], 0, N)
        lands.set()
        for half in (prefill, decode):
            half.wait(Closed, made.ticket)
        after = decode.bytes_of("kv", made.spans["kv"], 0, N)
        assert any((old != new).any() for old, new in zip(before, after, strict=True)), "the late write went elsewhere"
        assert decode.transfers.num_unfenced == 0


def test_nixl_requests_are_released_when_they_end() -> None:
    with pair(backend="nixl", options=STEADY) as (prefill, decode):
        sent(prefill, decode, N)
        decode.wait(Closed)
        [agent] = [agent for agent in nixlAgent.started.values() if agent.name == prefill.transfers.instance]
        assert agent._requests == {}


def test_nixl_write_that_was_never_begun_is_an_error_of_its_connection() -> None:
    writer = importlib.import_module("forebay.transfer.transports.nixl").NixlWriter
    with pytest.raises(OSError, match="never begun"):
        object.__new__(writer).advance()


def test_nixl_write_that_the_library_refuses_breaks_the_ticket(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise fake_libraries.nixlInvalidParamError("no such peer")

    with pair(backend="nixl", options=STEADY) as (prefill, decode):
        monkeypatch.setattr(nixlAgent, "createXferReq", refuse)
        made = sent(prefill, decode, N)
        assert "NIXL: nixlInvalidParamError: no such peer" in failure_of(prefill, made.ticket).message
        assert code_of(decode, made.ticket)
