"""Lines of the log that operators look for: each is written once, with what it says, when its event happens."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import forebay
from forebay.backends import native
from forebay.base.errors import Unavailable
from forebay.cli import startup_table
from forebay.engine.channel import ChannelError
from forebay.engine.lifecycle import contents, drafting, packed_cache
from forebay.engine.lifecycle.tiers import DISK, EngineTiers
from forebay.engine.loop import cache_checks, process
from forebay.formats import prefix_files, weights_cache
from forebay.http import door
from forebay.ops import compiled, compiler
from forebay.ops.triton import fallbacks
from forebay.ops.triton.launch import NotCompiled
from forebay.route import administration, exchange
from forebay.runtime.graphs import backends
from forebay.runtime.host import disk_store
from forebay.runtime.host.disk_store import DiskStore, LostRows
from forebay.server.admin import occupation, transfers
from forebay.text.answers import probes


class Log:
    """The lines that were logged."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def line(self, name: str) -> str:
        """The one line of an event."""
        (found,) = [line for line in self._caplog.messages if line.split()[0] == name]
        return found

    def has(self, name: str) -> bool:
        return any(line.split()[0] == name for line in self._caplog.messages)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[Log]:
    with caplog.at_level(logging.DEBUG, logger="forebay"):
        yield Log(caplog)


def request(request_id: str = "r1") -> Any:
    context = SimpleNamespace(request_id=request_id, tenant=SimpleNamespace(is_admin=True), sender=None)
    return SimpleNamespace(scope={"path": "/flush_cache", "state": {"context": context}, "context": context})


@pytest.fixture
def of_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a request be its own context."""
    found = SimpleNamespace(of=lambda scope: scope["context"])
    for module in (occupation, transfers):
        monkeypatch.setattr(module, "RequestContext", found)


@pytest.mark.usefixtures("of_context")
def test_cache_that_is_flushed_or_saved_is_logged_with_the_request(log: Log) -> None:
    asked: list[object] = []

    async def flush_cache() -> Any:
        return SimpleNamespace(pools={"kv": 1})

    async def ask(frame: object) -> None:
        asked.append(frame)

    server: Any = SimpleNamespace(
        engine=SimpleNamespace(flush_cache=flush_cache, link=SimpleNamespace(ask=ask)),
        model=SimpleNamespace(stall_timeout_s=60.0),
    )
    assert b'"kv":1' in asyncio.run(occupation.flush_cache(request(), server)).body
    assert log.line("cache_flushed") == "cache_flushed id=r1"
    assert b'"success":true' in asyncio.run(occupation.save_cache(request("r2"), server)).body
    assert log.line("cache_saved") == "cache_saved id=r2"
    assert asked == [occupation.SaveCache]


@pytest.mark.usefixtures("of_context")
def test_check_of_transfers_is_logged_with_the_number_of_wrong_columns(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def read_body(*_: object) -> Any:
        return SimpleNamespace(bootstrap_host="127.0.0.1", bootstrap_port=7)

    async def check_transfers(host: str, port: int) -> Any:
        return transfers_found

    transfers_found = SimpleNamespace(wrong=["kv 0.k", "kv 0.v"])
    monkeypatch.setattr(transfers, "read_body", read_body)
    monkeypatch.setattr(transfers, "json_response", lambda found: found)
    server: Any = SimpleNamespace(
        engine=SimpleNamespace(check_transfers=check_transfers), model=SimpleNamespace(mode=None)
    )
    assert asyncio.run(transfers.check_transfers(request(), server)) is transfers_found
    assert log.line("transfers_checked") == "transfers_checked id=r1 wrong=2"


def test_administration_of_members_is_logged_with_their_number_and_the_highest_status(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[object] = []

    async def outcome(_: object, __: object, member: str, ___: bytes) -> dict[str, Any]:
        return {"url": member, "status": 200 if member == "a" else 409, "answer": {}}

    async def check_now(member: object) -> None:
        checked.append(member)

    monkeypatch.setattr(administration, "_outcome", outcome)
    members = SimpleNamespace(all=["a", "b"], health=SimpleNamespace(check_now=check_now), forget=checked.append)
    router: Any = SimpleNamespace(id="router", members=members)
    answer = asyncio.run(administration._at_all(request(), router, b"", empties_cache=True))
    assert log.line("administered") == "administered path=/flush_cache members=2 status=409"
    assert (answer.status_code, checked) == (409, ["a", "b", "a", "b"])


def test_prefill_that_ends_without_its_answer_is_logged_and_its_place_given_back(log: Log) -> None:
    ended: list[str] = []

    class Broken:
        def relay(self) -> None: ...

        async def ended(self) -> None:
            raise Unavailable("closed the connection")

    class Sent:
        member = SimpleNamespace(url="http://one")
        upstream = Broken()

        def end(self) -> None:
            ended.append("prefill")

    made: Any = object.__new__(exchange.Exchange)
    made.sent = [Sent(), Sent()]
    asyncio.run(made.drain())
    assert log.line("prefill_not_drained") == 'prefill_not_drained at=http://one reason="closed the connection"'
    assert ended == ["prefill"], "decode's, the last, is not drained"


def test_door_without_the_kernels_filter_is_logged(log: Log) -> None:
    def refuses(*option: object) -> None:
        raise OSError("no such filter")

    listener: Any = SimpleNamespace(setsockopt=refuses)
    assert door._take_no_first_segments(listener) is False
    assert log.line("door_without_filter") == 'door_without_filter reason="no such filter"'
    with socket.create_server(("127.0.0.1", 0)) as real:
        assert door._take_no_first_segments(real) is True


def test_kernel_that_does_not_compile_is_logged_once_and_replaced(log: Log) -> None:
    def own(x: int) -> int:
        raise NotCompiled("no assembler")

    found: dict[str, str] = {}
    op = fallbacks._guarded("linear", own, lambda x: x + 1, found)
    assert [op(1), op(2)] == [2, 3]
    assert found == {"linear": "no assembler"}
    line = log.line("kernel_not_compiled")
    assert line.startswith('kernel_not_compiled op=linear reason="no assembler" effect="torch computes it: slower')


def test_ops_without_a_compiler_are_logged_with_each_reason(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    def library(variant: Any) -> Path:
        raise compiler.BuildError("no compiler")

    monkeypatch.setattr(compiler, "library", library)
    monkeypatch.setattr(native, "this_cpu", lambda: SimpleNamespace(variants=[SimpleNamespace(name="avx2")]))
    before = torch.get_num_threads()
    try:
        ops = native._make_best((1, 0, None))  # type: ignore[arg-type]
    finally:
        torch.set_num_threads(before)
    assert ops.name == "torch"
    line = log.line("native_ops_unavailable")
    assert line == 'native_ops_unavailable using=torch effect="several times slower" why="avx2: no compiler"'


def test_compiled_library_is_logged_with_its_variant_and_path(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "CACHE", tmp_path)
    monkeypatch.setattr(compiler, "_compile", lambda variant, using, scratch: scratch / "made")
    monkeypatch.setattr(compiled, "keep", lambda made, folder, stem: folder / f"{stem}.so")
    variant: Any = SimpleNamespace(name="avx2")
    assert compiler._built("avx2-0", variant, "g++") == tmp_path / "avx2-0.so"
    assert log.line("compiled_ops") == f"compiled_ops variant=avx2 path={tmp_path / 'avx2-0.so'}"


def test_captured_graph_is_logged_with_its_calls(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    class Recorder:
        def __init__(self, *_: object) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

        def finish(self, outputs: str) -> Any:
            return SimpleNamespace(num_kernels=3, num_torch_ops=1, outputs=outputs)

    monkeypatch.setattr(backends, "Recorder", Recorder)
    made: Any = object.__new__(backends.CpuGraphs)
    made._ops, made.arena = SimpleNamespace(kernels=None), None
    assert made.capture(lambda: "outputs").outputs == "outputs"
    assert log.line("graph_captured").startswith("graph_captured kernels=3 torch_ops=1 seconds=")


def test_startup_table_that_cannot_be_printed_is_logged_with_the_url(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    given_up: list[bool] = []

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("builtins.print", full)
    monkeypatch.setattr(startup_table, "give_up_stdout", lambda: given_up.append(True))
    startup_table.print_ready("http://127.0.0.1:1", 1.0, [], [])
    monkeypatch.undo()
    assert log.line("no_startup_table").endswith("url=http://127.0.0.1:1")
    assert given_up == [True]


def test_engine_whose_last_words_cannot_be_sent_logs_them_and_its_death(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Channel:
        def __init__(self, *_: object) -> None: ...

        def send(self, frame: object) -> None:
            raise ChannelError("the peer is gone")

        def close(self, linger_s: float) -> None: ...

    def broken(*_: object) -> None:
        raise KeyError("bug")

    monkeypatch.setattr(process, "Channel", Channel)
    monkeypatch.setattr(process, "_exit_with_peer", lambda sock: None)
    monkeypatch.setattr(process, "ENDING", ())
    monkeypatch.setattr(process, "_run", broken)
    assert process.serve(None, None) == process.EXIT_FAILED  # type: ignore[arg-type]
    assert log.line("last_words_unheard") == 'last_words_unheard reason="the peer is gone"'
    assert log.has("engine_died")


def test_options_of_a_draft_that_are_unknown_are_logged_by_name(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    for unknown in ((), ("new_norm", "new_rope")):
        found = SimpleNamespace(config=SimpleNamespace(unknown_options=unknown))
        monkeypatch.setattr(drafting, "open_checkpoint", lambda path, found=found: found)
        assert drafting._opened("draft") is found
    line = log.line("unknown_draft_options")
    assert line == 'unknown_draft_options names="new_norm, new_rope" effect="ignored: fewer guesses may be right"'


# The weights cache.


def test_contents_of_the_weights_cache_that_are_as_written_are_logged(log: Log, tmp_path: Path) -> None:
    checks: list[str] = []
    descriptor = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    file: Any = SimpleNamespace(descriptor=descriptor, check_on_disk=lambda: checks.append("read"))
    check = contents.ContentsCheck(SimpleNamespace(duplicate=lambda: file), tmp_path / "w")  # type: ignore[arg-type]
    for finish in (None, "stop"):
        check.note([SimpleNamespace(finish=finish)])  # type: ignore[list-item]
        check.wait()
        assert checks == ["read"] * (finish is not None)
    assert log.line("weights_cache_checked") == f"weights_cache_checked path={tmp_path / 'w'}"


@pytest.mark.parametrize("had", [True, False])
def test_start_that_waited_for_another_logs_how_that_ended(
    had: bool, log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def turn(folder: Path, key: object, *, most_s: float, waiting: Any) -> Iterator[bool]:
        if had:
            waiting(tmp_path / "other")
        yield had

    monkeypatch.setattr(packed_cache, "turn", turn)
    monkeypatch.setattr(weights_cache, "inode_of", lambda folder, key: 7)
    made: Any = object.__new__(packed_cache.PackedCache)
    made._config, made._folder, made._seen = SimpleNamespace(weights_cache_bytes=100), tmp_path, 7
    with made.turn("key", 10, 100) as is_another:
        assert is_another is False
    assert log.has("weights_cache_waits") is had
    assert log.has("weights_cache_waited") is had
    if had:
        assert log.line("weights_cache_waited").endswith("ended=True")


def test_weights_cache_that_is_written_is_logged_with_its_size(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "written"
    path.write_bytes(bytes(2048))
    monkeypatch.setattr(weights_cache, "write", lambda *_, **__: path)
    made: Any = object.__new__(packed_cache.PackedCache)
    made._ops, made._folder = SimpleNamespace(memory=SimpleNamespace(packed=[])), tmp_path
    made._config = SimpleNamespace(weights_cache_bytes=1 << 20)
    made.write("key", lambda *_: None)
    assert log.line("weights_cache_written").startswith(f'weights_cache_written path={path} size="2.0 KiB" seconds=')
    assert made.outcome == ("written 2.0 KiB", "the next start maps them")


# Prefixes in files.


def store(folder: Path, identity: dict[str, str] | None = None) -> DiskStore:
    mover: Any = SimpleNamespace(row_bytes={"kv": 8})
    return DiskStore(mover, folder, identity or {"weights": "a"}, limit_bytes=1 << 20)


def test_folder_that_another_process_writes_is_read_only_and_logged(log: Log, tmp_path: Path) -> None:
    first = store(tmp_path)
    assert first.writes
    assert not log.has("prefix_cache_read_only")
    second = store(tmp_path)
    assert not second.writes
    line = log.line("prefix_cache_read_only")
    assert line.startswith(f'prefix_cache_read_only path={tmp_path} reason="process {os.getpid()}')
    assert line.endswith('writes it"')
    for each in (second, first):
        each.close()


def test_segments_that_cannot_be_used_are_logged_with_the_reason(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = store(tmp_path)
    opened: list[object] = [prefix_files.Unreadable("its header is damaged"), ("segment", {"weights": "b"})]

    def open_segment(path: Path) -> object:
        found = opened.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(prefix_files, "paths", lambda folder: [folder / "one", folder / "two"])
    monkeypatch.setattr(prefix_files, "open_segment", open_segment)
    assert [*made.records()] == []
    made._segments.clear()
    lines = [line for line in log._caplog.messages if line.startswith("prefix_segment_ignored")]
    assert [f"path={tmp_path / name} " in line for name, line in zip(("one", "two"), lines, strict=True)] == [True] * 2
    assert 'reason="its header is damaged"' in lines[0]
    assert "weights" in lines[1]
    made.close()


def test_rows_of_a_file_that_cannot_be_read_are_lost_and_logged(
    log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_: object) -> None:
        raise disk_store.Unreadable("its checksum differs")

    made = store(tmp_path)
    made._places["kv", 3] = None  # type: ignore[assignment]
    monkeypatch.setattr(made, "_read", unreadable)
    copy: Any = SimpleNamespace(there={"kv": torch.tensor([3])}, number=1)
    monkeypatch.setattr(disk_store, "_slots", lambda copy: [("kv", 3)])
    with pytest.raises(LostRows, match="its checksum differs"):
        made.fetch(copy)
    assert log.line("prefix_rows_lost") == f'prefix_rows_lost path={tmp_path} reason="its checksum differs"'
    made.close()


def test_tokens_that_files_have_at_the_start_are_logged(log: Log) -> None:
    asked: list[object] = []

    def restore(name: str, records: object, *, writable: Callable[[], bool]) -> int:
        asked.append((name, records, writable()))
        return 480

    made: Any = object.__new__(EngineTiers)
    made._config = SimpleNamespace(tiers=SimpleNamespace(prefix_cache_dir="/cache"))
    tiers = SimpleNamespace(restore=restore, named=lambda name: SimpleNamespace(retained_slots="slots"))
    scheduler: Any = SimpleNamespace(memory=SimpleNamespace(tiers=tiers))
    made._disk = None
    made.restore(scheduler)
    assert not log.has("prefix_cache_restored")
    made._disk = SimpleNamespace(records=lambda: "records", writes=True)
    made.restore(scheduler)
    assert log.line("prefix_cache_restored") == "prefix_cache_restored path=/cache tokens=480"
    assert asked == [(DISK, "records", True)]
    assert made._disk.retained == "slots"


def test_check_of_an_entry_that_the_scheduler_refuses_is_logged_and_ends(
    log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[str] = []

    def add(*_: object) -> None:
        raise Unavailable("the queue is full")

    made: Any = object.__new__(cache_checks.CacheChecks)
    queues = SimpleNamespace(accounts={})
    made._scheduler = SimpleNamespace(queues=queues, counters=Counter(), chunk_limit=None, add=add)
    for name, value in (("_most_tokens", 8), ("_request", "request")):
        monkeypatch.setattr(made, name, lambda *_, value=value: value)
    monkeypatch.setattr(made, "_end", lambda: ends.append("ended"))
    entry: Any = SimpleNamespace(prefix=SimpleNamespace(key=bytes(12)), like=SimpleNamespace(adapter=None))
    made._begin(entry, 0.0)
    assert log.line("cache_check_refused") == 'cache_check_refused tokens=3 reason="the queue is full"'
    assert ends == ["ended"]


# What checkpoints declare of their answers.


def test_declaration_that_is_malformed_is_logged_and_ignored(log: Log) -> None:
    tokenizer: Any = SimpleNamespace(response_template={"fields": 5}, added=[])
    assert probes._declared(tokenizer) is None
    assert 'instead="the chat template decides"' in log.line("response_template_ignored")


def test_declaration_whose_fields_are_left_out_is_logged_by_name(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    regions = [SimpleNamespace(name=name, dropped=name != "text") for name in ("text", "notes", "mood")]
    declared = SimpleNamespace(regions=regions)
    monkeypatch.setattr(probes, "declaration_of", lambda template, added: declared)
    assert probes._declared(SimpleNamespace(response_template={}, added=[])) is declared  # type: ignore[arg-type]
    assert log.line("response_template_fields_left_out") == "response_template_fields_left_out fields=notes,mood"


def test_log_events_are_each_named_by_a_test() -> None:
    """A line that no test names could be lost, or change its name, and nobody would see."""
    package, own = Path(forebay.__file__).parent, Path(__file__).parent
    names: set[str] = set()
    for path in package.rglob("*.py"):
        names.update(re.findall(r'\bevent\(\s*"([a-z_]+)"', path.read_text()))
    text = "\n".join(path.read_text() for path in own.rglob("*.py") if "mutants" not in path.parts)
    assert len(names) > 90
    assert [name for name in sorted(names) if name not in text] == []
