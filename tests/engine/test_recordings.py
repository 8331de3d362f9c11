"""The flight recorder of an engine process: its file after a kill, a failure or a request, without tokens (C29)."""

from __future__ import annotations

import array
import asyncio
import os
import re
import signal
import stat
import zlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.base.errors import ConfigError, Conflict, EngineError
from forebay.base.exit_codes import EXIT_FAILED, EXIT_OK, EXIT_REFUSED
from forebay.base.pixels import num_pixel_bytes
from forebay.base.record_buffer import RecordBuffer, shared_memory
from forebay.cli import replay as command
from forebay.cli.commands import guarded
from forebay.config.engine_config import RecorderOptions, SchedulerConfig
from forebay.engine.client.async_engine import AsyncEngine
from forebay.engine.client.recordings import LEAST_BETWEEN_S, MOST_FILES, Recordings
from forebay.engine.lifecycle.launch import launch
from forebay.engine.recorder import file, mark
from forebay.engine.recorder.file import Header, read
from forebay.engine.recorder.hidden import Hidden
from forebay.engine.recorder.recorder import Recorder, decode_all, origin_of, start
from forebay.engine.recorder.replay import Replay
from forebay.memory.adapters import Adapters
from forebay.memory.kv_allocator import KV
from forebay.memory.tier import DISK
from forebay.requests.pictures import Picture, digest_of
from forebay.requests.request import Request
from forebay.requests.sampling_params import Grammar, GrammarKind, SamplingParams
from forebay.requests.step_plan import StepResult
from forebay.requests.updates import Failure
from forebay.scheduler.journal import Added, Beyond, Committed, Marked, Planning, Unwritable
from forebay.scheduler.recovery import end_requests_of
from forebay.scheduler.scheduler import Scheduler
from tests.deadlines import HANGS_S
from tests.engine.engine_fakes import CONFIG, ScriptedEngine, beat
from tests.engine.fake_engine import ENTRY, script
from tests.engine.scenes import FakeTime, play
from tests.kinds_of import kind_config
from tests.pictures import EDGE, PLACEHOLDER, SIZE, picture_config
from tests.scheduler.rig import Rig
from tests.simulation.rig import config

CANARY = "the canary sings"
PIXELS = (CANARY.encode() * 3)[: num_pixel_bytes([SIZE])]
LOST = Failure("EngineError", "as recorded", "adapter_lost")
SHARED = {
    "pictures": picture_config(vocab_size=1 << 16),
    "max_loras": 2,
    "tenants": {CANARY: 2, KV: 1, "another": 1},
}
PROMPT = list(CANARY.encode())  # tokens that are the bytes of a text
SHOWN = Picture(digest=digest_of(PIXELS, (1, 1), (SIZE,)), grid=(1, 1), sizes=(SIZE,), pixels=PIXELS, runs=((1, 3),))
SHOWING = [*PROMPT[:1], *[PLACEHOLDER] * 3, *PROMPT]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "forebay" / "flights"


def traces(prompt: list[int]) -> Iterator[bytes]:
    """The forms in which a prompt could be in a file."""
    yield bytes(prompt)
    for code in "hiq":
        yield array.array(code, prompt).tobytes()


def under_load(end: Callable[[AsyncEngine], Awaitable[Any]], *, tokens: bool = False, num_bytes: int = 1 << 20) -> None:
    """Run `end` while requests with the canary are computed by an engine process."""

    async def main() -> None:
        options = RecorderOptions(flight_recorder=num_bytes, record_tokens=tokens)
        engine = await AsyncEngine.connect(launch(replace(script(step=0.002), recorder=options), entry=ENTRY))
        try:
            async with asyncio.timeout(HANGS_S):
                await engine.ready()
                params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
                streams = [
                    engine.submit(prompt_token_ids=[*PROMPT, i], params=params, namespace=CANARY) for i in range(6)
                ]
                for stream in streams:
                    await anext(aiter(stream))
                await end(engine)
        finally:
            await engine.close(0.0)

    asyncio.run(main())


async def kill(engine: AsyncEngine) -> None:
    os.kill(engine.link.pid, signal.SIGKILL)
    await engine.link.died()


def only(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_recordings_engine_killed_under_load_leaves_a_private_file_without_the_prompt(
    folder: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    under_load(kill)
    path = only(folder)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    content = path.read_bytes()
    assert not [trace for trace in traces(PROMPT) if trace in content]
    recording = read(path)
    assert "SIGKILL" in recording.header.reason
    assert f'flight_recorder_written reason="{recording.header.reason}" path={path}' in caplog.text
    added = [record for record in recording.records if isinstance(record, Added)]
    assert [record.id for record in added] == [1, 2, 3, 4, 5, 6]
    first, *others = (array.array("i", record.tokens).tolist() for record in added)
    assert all(other[: len(PROMPT)] == first[: len(PROMPT)] and other[-1] != first[-1] for other in others)
    assert command.run([str(path)]) == 0
    assert "plans are the same" in capsys.readouterr().out


def test_recordings_tokens_are_in_the_file_if_that_is_set(folder: Path) -> None:
    under_load(kill, tokens=True)
    recording = read(only(folder))
    added = [record for record in recording.records if isinstance(record, Added)]
    assert array.array("i", added[0].tokens).tolist() == [*PROMPT, 0]
    assert command.run([str(only(folder))]) == 0


def test_recordings_written_on_request_while_the_engine_goes_on_can_be_replayed(folder: Path) -> None:
    paths: list[Path] = []

    async def ask(engine: AsyncEngine) -> None:
        paths.append(await engine.link.recordings.write("a test"))

    under_load(ask)
    assert [only(folder)] == paths
    assert read(paths[0]).header.reason == "a test"
    assert command.run([str(paths[0])]) == 0


def test_recordings_ring_that_was_overwritten_prints_recorded_plans_only(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def later(engine: AsyncEngine) -> None:
        while (await engine.state()).step < 120:
            await asyncio.sleep(0)
        await engine.link.recordings.write("a test")

    under_load(later, num_bytes=2000)
    path = only(folder)
    with pytest.raises(ConfigError, match=r"older records were overwritten.*steps (\d+) to (\d+)"):
        command.run([str(path)])
    steps = [record.step for record in read(path).records if isinstance(record, Committed)]
    assert command.run([str(path), "--step", str(steps[-1])]) == 0
    assert f"step {steps[-1]}: " in capsys.readouterr().out


def test_recordings_without_a_recorder_refuse(folder: Path) -> None:
    async def ask(engine: AsyncEngine) -> None:
        with pytest.raises(Conflict, match="--flight-recorder 16MiB"):
            await engine.link.recordings.write("a test")

    under_load(ask, num_bytes=0)
    assert not folder.exists()


def recorded_scheduler(
    settings: SchedulerConfig | None = None, before: Callable[[Adapters], None] = lambda adapters: None
) -> tuple[Scheduler, RecordBuffer]:
    """A scheduler that is recorded, and a reader of its buffer. `before` loads what is there at the start."""
    with shared_memory("test") as memory:
        reader, writer = RecordBuffer.of(memory.fileno(), 1 << 16), RecordBuffer.existing(memory.fileno())
    scheduler = Scheduler(settings or config())
    before(scheduler.pools.adapters)
    assert writer is not None
    start(scheduler, writer)
    return scheduler, reader


def run_alone(scheduler: Scheduler, request_id: int, prompt: list[int]) -> None:
    """Compute a request, and let the idle scheduler be audited."""
    scheduler.add(
        Request(request_id, prompt, SamplingParams(max_tokens=3), namespace=CANARY, author=CANARY), request_id
    )
    while not scheduler.idle:
        plan = scheduler.plan(request_id)
        assert plan is not None
        tokens = [len(scheduler.requests[request_id].tokens)] * int(plan.sample_mask.sum())
        scheduler.commit(plan, StepResult(token_ids=tokens), request_id)
        scheduler.take_updates()
    scheduler.reclaim_leaks()


def test_recordings_ring_that_was_overwritten_is_replayed_from_an_idle_moment(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler, buffer = recorded_scheduler()
    for number in range(1, 160):
        run_alone(scheduler, number, [*PROMPT, *([number % 7] * (number % 50))])
    scheduler.expire(1000.0)  # the last plan is appended with it
    path, content = folder / "one.bin", buffer.content()
    assert content.num_lost_bytes > 0
    file.write(path, Header(num_lost_bytes=content.num_lost_bytes), content)
    assert command.run([str(path)]) == 0
    said = capsys.readouterr()
    assert re.search(r"the replay begins behind step [\d,]+, record [\d,]+, when the engine was idle", said.err)
    (count,) = re.findall(r"([\d,]+) plans are the same", said.out)
    assert int(count.replace(",", "")) > 100
    states = [zlib.decompress(record.state) for record in read(path).records if isinstance(record, Marked)]
    assert len(states) > 1
    assert not [trace for state in states for trace in (*traces(PROMPT), CANARY.encode()) if trace in state]


def test_replay_from_a_mark_of_an_engine_with_pictures_and_adapters_is_the_same() -> None:
    scheduler, data = Scheduler(config(**SHARED)), list[bytes]()
    origin = origin_of(scheduler)
    scheduler.queues.journal = Recorder(
        lambda record, before=None: data.extend(filter(None, (before, record))), mark.Marks(scheduler), 0, 1 << 20
    )
    load(scheduler.pools.adapters, CANARY)
    for number in (1, 3):
        ask_both(scheduler, number)
        scheduler.reclaim_leaks()
    records = decode_all(data)
    hiding = Hidden(origin, b"a key for a test")
    hidden = [*hiding.all(records)]
    assert CANARY not in repr((hiding.origin, hidden))
    assert [*hiding.origin.config.tenants] == ["tenant 3", KV, "tenant 1"], "a kind of cache has the name of the other"
    for its, begin in ((records, origin), (hidden, hiding.origin)):
        outcome = Replay(origin=begin, records=its, begins_at_mark=True).run()
        assert (outcome.difference, outcome.ended) == (None, "")
        assert outcome.num_plans == 2  # of the second pair: its prompts are cached, its picture is known
    states = [zlib.decompress(record.state) for record in hidden if isinstance(record, Marked)]
    assert len(states) == 2
    digest = digest_of(PIXELS, (1, 1), (SIZE,))
    assert not [trace for state in states for trace in (*traces(PROMPT), CANARY.encode(), digest) if trace in state]
    assert not [
        record for record in records if isinstance(record, Marked) and b"/models/" in zlib.decompress(record.state)
    ]


@pytest.mark.parametrize("is_recorded", [True, False])
def test_replay_stores_nothing_in_files_from_where_they_could_no_longer_be_written(is_recorded: bool) -> None:
    data, slots = list[bytes](), {KV: 24}
    rig = Rig(num_pages=15, tiers={DISK: slots}, kinds=kind_config(slot_bytes={KV: 4}, recompute_bytes_per_token=200))
    origin = origin_of(rig.scheduler)
    journal = Recorder(lambda record, before=None: data.extend(filter(None, (before, record))))
    rig.scheduler.queues.journal = journal
    disk = rig.scheduler.memory.tiers.named(DISK)
    for is_writable in (True, False):
        disk.writable = partial(bool, is_writable)
        rig.scheduler.notice_unwritable()
        rig.add(12, max_new=2)
        rig.run()
        assert disk.cache.num_pages == 3, "pages of the first prompt alone"
    rig.scheduler.expire(0.0)  # the last plan is appended with it
    records = [one for one in decode_all(data) if is_recorded or not isinstance(one, Unwritable)]
    outcome = Replay(origin=origin, records=records).run()
    assert (outcome.difference is None, outcome.ended) == (is_recorded, "")


def test_state_that_cannot_be_kept_is_named_by_the_replay(folder: Path) -> None:
    scheduler, buffer = recorded_scheduler()
    scheduler.memory.what_is_new = Grammar(GrammarKind.REGEX, "")  # type: ignore[attr-defined]
    scheduler.queues.journal.__self__._every_bytes = 0
    scheduler.reclaim_leaks()
    path = folder / "one.bin"
    file.write(path, Header(num_lost_bytes=1), buffer.content())
    with pytest.raises(ConfigError, match=r"could not be kept \(it has Grammar\)"):
        command.run([str(path)])


def test_state_that_the_replay_refuses_does_not_keep_a_file_from_being_written(folder: Path) -> None:
    scheduler, buffer = recorded_scheduler()
    scheduler.queues.journal(Marked(1, zlib.compress(b"no state")))
    path = folder / "one.bin"
    file.write(path, Header(num_lost_bytes=1), buffer.content())
    with pytest.raises(ConfigError, match=r"could not be kept \(this is no state of its scheduler"):
        command.run([str(path)])


def test_marks_scheduler_with_a_request_has_no_state() -> None:
    scheduler = Scheduler(config())
    marks = mark.Marks(scheduler)
    assert marks.take()
    scheduler.add(Request(1, [1, 2, 3], SamplingParams(max_tokens=2)), 0.0)
    with pytest.raises(mark.NoMark, match="not at rest"):
        marks.take()


@pytest.mark.parametrize("seed", range(20))
def test_replay_from_an_altered_mark_gives_one_line_or_a_replay(folder: Path, seed: int) -> None:
    scheduler, buffer = recorded_scheduler()
    run_alone(scheduler, 1, PROMPT)
    state = bytearray(zlib.decompress(mark.Marks(scheduler).take()))
    state[seed * len(state) // 20] ^= 0x41
    scheduler.queues.journal(Marked(1, zlib.compress(bytes(state))))
    path = folder / "one.bin"
    file.write(path, Header(has_tokens=True, num_lost_bytes=1), buffer.content())
    assert guarded(lambda: command.run([str(path)])) in (EXIT_OK, EXIT_FAILED, EXIT_REFUSED)


def test_recordings_folder_that_cannot_be_written_is_logged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, buffer = recorded_scheduler()
    folder.parent.mkdir(parents=True)
    folder.write_text("a file in its place")

    async def main() -> None:
        recordings = Recordings(buffer, dict, has_tokens=False)
        recordings.begin("a test")
        await recordings.settle()
        with pytest.raises(EngineError, match="could not be written"):
            await recordings.write("a test")

    asyncio.run(main())
    assert "flight_recorder_failed" in caplog.text


def test_recordings_of_an_engine_that_still_starts_say_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its scheduler is not made yet, and the buffer has nothing."""
    with shared_memory("test") as memory:
        buffer = RecordBuffer.of(memory.fileno(), 1 << 16)

    async def main() -> None:
        recordings = Recordings(buffer, dict, has_tokens=False)
        recordings.begin("a test")
        await recordings.settle()
        with pytest.raises(Conflict, match="nothing is recorded yet: the engine still starts"):
            await recordings.write("a test")

    asyncio.run(main())
    assert "flight_recorder_failed" in caplog.text
    assert not folder.exists()


def test_recordings_engine_that_hangs_at_a_step_leaves_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.engine.client.link.WATCH_INTERVAL_S", 0.0)
    scheduler, buffer = recorded_scheduler()
    scheduler.add(Request(1, [1, 2, 3], SamplingParams(max_tokens=2)), 0.0)

    async def scene(engine: AsyncEngine, peer: ScriptedEngine) -> None:
        engine.link.recordings = Recordings(buffer, dict, has_tokens=False)
        peer.say(beat(turn_age_s=CONFIG.scheduling.stall_timeout_s + 1))
        assert (await engine.link.died()).code == "engine_stalled"
        await engine.link.recordings.settle()

    play(scene, time=FakeTime())
    recording = read(only(folder))
    assert "the engine has been at one step for 61.0 s" in recording.header.reason
    assert [type(record) for record in recording.records] == [Added]


def test_recordings_faults_that_are_counted_write_a_file_each_minute_at_most(folder: Path) -> None:
    _, buffer = recorded_scheduler()
    now = 0.0

    async def main() -> None:
        nonlocal now
        recordings = Recordings(buffer, dict, has_tokens=False, clock=lambda: now)
        recordings.note({"failed_steps": 0.0})
        await recordings.settle()
        assert not folder.exists()
        for count in range(1, 40):
            recordings.note({"failed_steps": float(count), "ledger_violations": float(count)})
            await recordings.settle()
            now += LEAST_BETWEEN_S / 2
        assert len([*folder.iterdir()]) == MOST_FILES
        recordings.begin("the engine died", last=True)
        await recordings.settle()

    asyncio.run(main())
    reasons = sorted(read(path).header.reason for path in folder.iterdir())
    assert set(reasons) == {"a step failed", "the engine died"}


def test_recordings_hold_no_text_of_a_request(folder: Path) -> None:
    scheduler, buffer = recorded_scheduler()
    params = SamplingParams(max_tokens=9, logit_bias={1: 1.0}, bad_words=((1, 2),), stop_token_ids=(7,))
    scheduler.add(Request(1, PROMPT, params, namespace=CANARY, author=CANARY), 0.0)
    file.write(folder / "one.bin", Header(), buffer.content())
    content = (folder / "one.bin").read_bytes()
    assert not [trace for trace in (*traces(PROMPT), CANARY.encode()) if trace in content]


def with_pictures_and_adapters(*, shows: bool = True) -> tuple[Scheduler, RecordBuffer]:
    """An engine that began with an adapter, whose recorder has a request with a picture and two with an adapter, one of
    which is lost."""
    settings = config(pictures=picture_config(vocab_size=1 << 16), max_loras=2)
    scheduler, buffer = recorded_scheduler(settings, before=lambda adapters: load(adapters, "first"))
    load(scheduler.pools.adapters, CANARY)
    adapters = scheduler.pools.adapters
    for number, named in enumerate(["", "first", CANARY], 1):
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        request = Request(number, SHOWING, params, adapter=adapters.named(named) if named else None)
        scheduler.add(request, 0.0, [SHOWN] if shows and not named else [])
    adapters.unload("first")
    while (plan := scheduler.plan(1.0)) is not None:
        scheduler.commit(plan, StepResult(token_ids=[7] * int(plan.sample_mask.sum())), 1.0)
        end_requests_of(scheduler.queues, scheduler.outputs, 2, LOST)
    scheduler.expire(2.0)
    return scheduler, buffer


def ask_both(scheduler: Scheduler, number: int) -> None:
    """Compute a request with a picture and one with an adapter, of the numbers from `number` on."""
    params, adapter = SamplingParams(max_tokens=2, ignore_eos=True), scheduler.pools.adapters.named(CANARY)
    scheduler.add(Request(number, SHOWING, params, namespace=CANARY, tenant=CANARY), number, [SHOWN])
    scheduler.add(Request(number + 1, SHOWING, params, adapter=adapter), number)
    while not scheduler.idle:
        plan = scheduler.plan(number)
        assert plan is not None
        scheduler.commit(plan, StepResult(token_ids=[7] * int(plan.sample_mask.sum())), number)
        scheduler.take_updates()


def load(adapters: Adapters, name: str) -> None:
    """Load an adapter whose path is the canary's."""
    adapter = adapters.begin(name, f"/models/{CANARY}")
    adapter.digest = "ab" * 32
    adapters.loaded(adapter)


def test_recordings_with_pictures_and_adapters_hold_neither_pixels_nor_paths_and_are_replayed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, buffer = with_pictures_and_adapters()
    raw = b"".join(buffer.content().records)
    assert not [trace for trace in (PIXELS, f"/models/{CANARY}".encode()) if trace in raw]
    path = folder / "one.bin"
    file.write(path, Header(), buffer.content())
    content = path.read_bytes()
    digest = digest_of(PIXELS, (1, 1), (SIZE,))
    assert not [trace for trace in (*traces(PROMPT), PIXELS, digest, CANARY.encode()) if trace in content]
    added = [record for record in read(path).records if isinstance(record, Added)]
    assert [len(record.pictures) for record in added] == [1, 0, 0]
    assert command.run([str(path)]) == 0
    assert re.search(r"^[1-9]\d* plans are the same$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    "changed",
    [
        lambda record: replaced(record, sizes=((EDGE, EDGE),), runs=((1, 1),)),
        lambda record: replaced(record, runs=((2, 3),)),
    ],
    ids=["another size", "another place"],
)
def test_replay_with_another_picture_differs(folder: Path, changed: Callable[[Added], Added]) -> None:
    scheduler, buffer = with_pictures_and_adapters()
    records = decode_all(buffer.content().records)
    others = [changed(record) if isinstance(record, Added) and record.pictures else record for record in records]
    origin = origin_of(scheduler)
    assert Replay(origin=origin, records=records).run().difference is None
    assert Replay(origin=origin, records=others).run().difference is not None


def replaced(record: Added, **fields: Any) -> Added:
    """The record of a request whose picture is another one."""
    (shown,) = record.pictures
    return msgspec.structs.replace(record, pictures=(msgspec.structs.replace(shown, **fields),))


def test_journal_grammar_of_a_request_is_not_recorded() -> None:
    params = SamplingParams(grammar=Grammar(GrammarKind.REGEX, CANARY))
    record = Added.of(Request(1, [1], params), 0.0)
    assert CANARY not in repr(record)
    assert record.params.params().grammar is not None


@pytest.fixture
def written(folder: Path) -> Path:
    scheduler, buffer = recorded_scheduler()
    scheduler.add(Request(1, [1, 2, 3], SamplingParams(max_tokens=2)), 0.0)
    scheduler.plan(1.0)
    scheduler.expire(2.0)  # a plan is appended with the next record
    path = folder / "one.bin"
    file.write(path, Header(model={"model_type": "llama"}, reason="a test"), buffer.content())
    return path


def test_replay_engine_that_died_behind_a_plan_decides_it_again(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scheduler, buffer = recorded_scheduler()
    scheduler.add(Request(1, [1, 2, 3], SamplingParams(max_tokens=2)), 0.0)
    plan = scheduler.plan(1.0)
    path = folder / "one.bin"
    file.write(path, Header(), buffer.content())
    assert [type(record) for record in read(path).records] == [Added, Planning]
    assert plan is not None
    assert command.run([str(path), "--step", str(plan.step)]) == 0
    assert "row 1: prompt tokens 0 to 3, request 1 begins" in capsys.readouterr().out


def test_replay_that_compares_no_plan_is_no_success(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scheduler, buffer = recorded_scheduler()
    scheduler.expire(0.0)
    file.write(folder / "idle.bin", Header(model={"model_type": "llama"}), buffer.content())
    scheduler.queues.journal(Beyond("an entry was dropped"))
    run_alone(scheduler, 1, PROMPT)
    file.write(folder / "beyond.bin", Header(), buffer.content())
    for name in ("idle.bin", "beyond.bin"):
        assert command.run([str(folder / name)]) == EXIT_REFUSED
        assert "no plan was compared" in capsys.readouterr().out
    assert command.run([str(folder / "idle.bin"), "--on", "tiny"]) == EXIT_REFUSED


def test_replay_prints_the_plan_of_a_step(written: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = next(record.step for record in read(written).records if hasattr(record, "rows"))
    assert command.run([str(written), "--step", str(step)]) == 0
    assert "row 1: prompt tokens 0 to 3, request 1 begins" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="there is no step 99; 1 plans were repeated"):
        command.run([str(written), "--step", "99"])


def test_replay_plan_that_differs_is_printed_beside_the_recorded_one(
    written: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Added, "request", lambda record, adapter: Request(1, [1, 2], SamplingParams(max_tokens=2)))
    assert command.run([str(written)]) == 1
    out = capsys.readouterr().out
    assert "the next one differs" in out
    assert "prompt tokens 0 to 3" in out
    assert "| " in out
    assert "prompt tokens 0 to 2" in out


def test_file_of_another_version_is_refused_by_its_name(folder: Path) -> None:
    _, buffer = recorded_scheduler()
    path = folder / "one.bin"
    file.write(path, Header(version="9.8.7"), buffer.content())
    with pytest.raises(ConfigError, match=r"written by forebay '9\.8\.7'.*replay it with that version"):
        read(path)
    path.unlink()
    file.write(path, Header(format=77), buffer.content())
    with pytest.raises(ConfigError, match="in format 77"):
        read(path)


def test_file_cut_anywhere_gives_one_line(written: Path) -> None:
    content = written.read_bytes()
    lines = set()
    for length in range(0, len(content), 29):
        written.write_bytes(content[:length])
        try:
            assert len(read(written).records) < 4  # it was cut between two parts
        except ConfigError as error:
            lines.add(error.message)
    assert any("truncated" in line for line in lines)
    assert not [line for line in lines if "\n" in line or str(written) not in line]


@pytest.mark.parametrize("seed", range(60))
def test_file_altered_anywhere_gives_one_line_or_a_replay(
    written: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    content = bytearray(written.read_bytes())
    at = seed * len(content) // 60
    content[at] ^= 0x41
    written.write_bytes(content)
    assert guarded(lambda: command.run([str(written)])) in (EXIT_OK, EXIT_FAILED, EXIT_REFUSED)
    assert capsys.readouterr().err.count("\n") <= 2  # about the file, or one line why not


def test_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_text("hello")
    with pytest.raises(ConfigError, match="no file of a flight recorder"):
        read(path)
    with pytest.raises(ConfigError, match="No such file"):
        read(tmp_path / "none")
    with pytest.raises(ConfigError, match="which file"):
        command.run([])
