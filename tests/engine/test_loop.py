"""The loop between a channel and the core."""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import starmap
from math import inf
from typing import Any

import msgspec
import numpy as np
import pytest

from forebay.base import fault
from forebay.base.errors import Conflict
from forebay.config.engine_config import EngineConfig, Ledger
from forebay.engine import channel as channel_module
from forebay.engine.channel import Channel, ChannelError, FrameDecoder, FrameEncoder, FrameTooLarge
from forebay.engine.frames import (
    AbortRequest,
    AddEndTokens,
    AddRequest,
    CheckTransfers,
    FlushCache,
    FromEngine,
    GetState,
    GetTree,
    LoadAdapter,
    Release,
    Resume,
    SaveCache,
    Shutdown,
    State,
    ToEngine,
    TreePart,
    Updates,
    UpdateWeights,
)
from forebay.engine.lifecycle.sleep import NoMemory
from forebay.engine.loop import loop as loop_module
from forebay.engine.loop.cache_checks import CacheChecks
from forebay.engine.loop.core import STEP_LIMIT_S
from forebay.engine.loop.loop import EngineLoop
from forebay.memory.slots import Ids
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.updates import FinishReason, Update
from forebay.scheduler.counters import STEP_TOKENS
from tests.deadlines import NEVER_S
from tests.engine.engine_fakes import CONFIG, READY, beat, changed, fake_core, reference


class Peer:
    """The server's end of the channel, and the loop at the other one."""

    def __init__(self, config: EngineConfig = CONFIG, **clock: Callable[[], float]) -> None:
        self.sock, theirs = socket.socketpair()
        self.core, self.runner = fake_core(config, **clock)
        self.loop = EngineLoop(self.core, Channel(theirs, ToEngine), **clock)
        self._theirs = theirs
        self._encoder = FrameEncoder()
        self._decoder: FrameDecoder[FromEngine] = FrameDecoder(FromEngine)

    def say(self, *frames: msgspec.Struct) -> None:
        for frame in frames:
            self.sock.sendall(self._encoder.encode(frame))

    def heard(self) -> list[FromEngine]:
        self.sock.setblocking(False)
        try:
            return self._decoder.feed(self.sock.recv(1 << 20))
        except BlockingIOError:
            return []
        finally:
            self.sock.setblocking(True)

    def work(self) -> list[FromEngine]:
        """Turn the loop until it would fall asleep."""
        self.loop.turn()
        frames = self.heard()
        while not self.core.idle:
            self.loop.turn()
            frames += self.heard()
        return frames

    def close(self) -> None:
        self.sock.close()
        self._theirs.close()


def news(frames: list[FromEngine]) -> list[Update]:
    """The updates of all requests, one by one."""
    return [
        update
        for frame in frames
        if isinstance(frame, Updates)
        for update in [*starmap(Update, frame.tokens()), *frame.updates]
    ]


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.close()
    fault.disarm()


def add(request_id: int, prompt: list[int], num_tokens: int = 5) -> AddRequest:
    params = SamplingParams(max_tokens=num_tokens)
    return AddRequest(request_id=request_id, prompt_token_ids=prompt, params=params)


def tokens_of(frames: list[FromEngine], request_id: int) -> list[int]:
    updates = news(frames)
    return [token for update in updates if update.request_id == request_id for token in update.token_ids]


def test_each_step_sends_all_its_news_in_one_frame(peer: Peer) -> None:
    peer.say(*(add(i, [i, i + 1]) for i in range(1, 7)))
    frames = [frame for frame in peer.work() if isinstance(frame, Updates)]
    assert len(frames) == len(peer.runner.plans) == 5
    for i in range(1, 7):
        assert tokens_of(list(frames), i) == reference([i, i + 1], 5)


def test_added_end_tokens_end_later_answers_within_the_vocabulary(peer: Peer) -> None:
    whole = reference([1, 2], 5)
    peer.say(add(1, [1, 2]), AddEndTokens([whole[2], READY.vocab_size, -1]), add(2, [1, 2]))
    frames = peer.work()
    assert tokens_of(frames, 1) == whole
    assert tokens_of(frames, 2) == whole[: whole.index(whole[2]) + 1]
    assert peer.core.end_tokens.ids == (whole[2],)


def test_frames_that_arrived_before_the_loop_are_handled_first(peer: Peer) -> None:
    whole = reference([1, 2], 5)
    peer.say(add(1, [1, 2]))
    peer.sock.shutdown(socket.SHUT_WR)
    peer.loop.run([AddEndTokens([whole[2]]), GetState(serial=4)])
    assert peer.core.end_tokens.ids == (whole[2],)
    assert any(isinstance(frame, State) and frame.answers == 4 for frame in peer.heard())


def test_a_refusal_is_an_update_with_the_reason(peer: Peer) -> None:
    peer.say(add(1, [1] * 1000), add(2, [1, 2]))
    frames = peer.work()
    refusal = next(update for update in news(frames) if update.request_id == 1)
    assert refusal.finish is FinishReason.ERROR
    assert refusal.failure is not None
    assert (refusal.failure.kind, refusal.failure.code) == ("RequestTooLarge", "context_length_exceeded")
    assert tokens_of(frames, 2) == reference([1, 2], 5)


def test_an_abort_is_answered_and_stops_the_work(peer: Peer) -> None:
    peer.say(add(1, [1, 2], 100))
    for _ in range(3):
        peer.loop.turn()
    steps = len(peer.runner.plans)
    peer.say(AbortRequest(request_id=1), AbortRequest(request_id=99))
    frames = peer.work()
    ends = [update.finish for update in news(frames) if update.finish]
    assert ends == [FinishReason.ABORT]
    assert len(peer.runner.plans) == steps


def test_states_answer_the_question_that_was_asked(peer: Peer) -> None:
    peer.say(add(1, list(range(32))))
    peer.work()
    peer.say(GetState(serial=3), FlushCache(serial=4))
    before, after = (frame for frame in peer.work() if isinstance(frame, State))
    assert (before.answers, after.answers) == (3, 4)
    assert before.pools[0].cached > 0
    assert after.pools[0].cached == 0
    assert after.pools[0].free == after.pools[0].total
    assert after.counters["generated_tokens"] == 5
    assert after.counters["engine.steps"] == 5
    assert after.counters["engine.step_tokens"] == 32 + 4, "the prompt, and four decodes of one token"
    at_most = {bound: after.counters[f"engine.step_tokens_{bound}"] for bound in STEP_TOKENS}
    assert at_most == {bound: 4 + (bound >= 32) for bound in STEP_TOKENS}
    assert after.last_step_age_s == 0


def test_loop_flush_of_many_leaves_serves_requests_between_its_slices(peer: Peer) -> None:
    pools = peer.core.scheduler.pools
    for i in range(200):
        key = np.full(4, 500 + i, dtype=np.int32).tobytes()
        pools.cache.insert(key, pools.kv.take_ids(1, 1), 1)
    peer.say(FlushCache(serial=4), add(1, [1, 2, 3], num_tokens=2))
    frames: list[FromEngine] = []
    for _ in range(2):
        assert not any(isinstance(frame, State) and frame.answers == 4 for frame in frames)
        peer.loop.turn()
        frames += peer.heard()
    assert tokens_of(frames, 1) == reference([1, 2, 3], 2), "both steps ran before the flush had ended"
    assert (peer.core.idle, peer.core.step_age_s()) == (False, 0.0)
    (state,) = (frame for frame in peer.work() if isinstance(frame, State) and frame.answers == 4)
    assert state.pools[0].cached == 1, "the page of the request, which came later"


class SavedFiles:
    """Files of a prefix cache, which fail if `error` is set."""

    error: Exception | None = None
    num_saves = 0

    def save(self) -> None:
        if self.error is not None:
            raise self.error
        self.num_saves += 1

    def close(self) -> None:
        """Nothing is left to write."""


def test_loop_save_without_files_is_refused_with_the_flag_to_set(peer: Peer) -> None:
    peer.say(SaveCache(serial=5))
    (state,) = (frame for frame in peer.work() if isinstance(frame, State))
    assert state.answers == 5
    assert state.refused is not None
    assert (state.refused.kind, state.refused.code) == ("Conflict", "no_prefix_cache_dir")
    assert "--prefix-cache-dir" in state.refused.message


@pytest.mark.parametrize("error", [None, OSError(28, "No space left on device"), Conflict("another", code="disk")])
def test_loop_save_answers_once_files_are_written(peer: Peer, error: Exception | None) -> None:
    files = peer.core.files = SavedFiles()
    files.error = error
    peer.say(SaveCache(serial=6), SaveCache(serial=7))
    states = [frame for frame in peer.work() if isinstance(frame, State)]
    assert [state.answers for state in states] == [6, 7]
    assert files.num_saves == (error is None)
    assert all((state.refused is None) == (error is None) for state in states)


def test_a_frame_over_the_cap_is_split(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_FRAME_BYTES", 90)
    peer.say(*(add(i, [i, i + 1]) for i in range(1, 9)))
    frames = peer.work()
    assert len(frames) > len(peer.runner.plans)
    for i in range(1, 9):
        assert tokens_of(frames, i) == reference([i, i + 1], 5)


def test_loop_update_over_the_cap_by_itself_fails_its_request_alone(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sent = peer.loop._channel.send

    def send(frame: FromEngine) -> None:
        if any(update.request_id == 1 and not update.failure for update in news([frame])):
            raise FrameTooLarge("the frame would be 9 bytes")
        sent(frame)

    monkeypatch.setattr(peer.loop._channel, "send", send)
    peer.say(add(1, [1, 2]), add(2, [2, 3]))
    frames = peer.work()
    (failure,) = [update.failure for update in news(frames) if update.failure]
    assert failure.message == "the frame would be 9 bytes: ask for fewer log-probabilities"
    assert tokens_of(frames, 2) == reference([2, 3], 5)
    assert 'update_too_large id=1 reason="the frame would be 9 bytes"' in caplog.messages


def test_shutdown_ends_the_loop_and_so_does_a_closed_channel(peer: Peer, caplog: pytest.LogCaptureFixture) -> None:
    peer.say(add(1, [1, 2]), Shutdown())
    peer.loop.run()
    other = Peer()
    other.sock.close()
    with caplog.at_level("INFO", "forebay"):
        other.loop.run()
    other.close()
    assert [record.getMessage().partition(" ")[0] for record in caplog.records] == ["peer_gone"]


def test_loop_ignores_a_frame_for_a_part_that_the_engine_lacks_and_logs_its_type(
    peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    peer.say(LoadAdapter(serial=1, name="a", path="/a"), CheckTransfers(serial=2, host="h", port=1), add(1, [1, 2]))
    assert tokens_of(peer.work(), 1) == reference([1, 2], 5)
    ignored = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert ignored == ["frame_ignored type=LoadAdapter", "frame_ignored type=CheckTransfers"]


def test_what_is_no_frame_ends_the_loop_with_an_error(peer: Peer) -> None:
    peer.sock.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    with pytest.raises(ChannelError):
        peer.loop.run()
    assert peer.core.idle


def test_pages_that_leaked_are_set_aside_once_the_engine_is_idle(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("forebay.engine.loop.loop.AUDIT_INTERVAL_S", 0.0)
    peer = Peer(changed(ledger=Ledger.COUNT))
    nobody = 77
    peer.core.scheduler.pools.kv.take_ids(2, nobody)
    peer.say(add(1, [1, 2]))
    peer.work()
    peer.say(GetState(serial=1))
    (state,) = (frame for frame in peer.work() if isinstance(frame, State))
    assert state.pools[0].quarantined == 2
    assert state.counters["leaked_pages"] == 2
    assert 'pages_leaked pages=2 effect="quarantined until the next start"' in caplog.messages
    peer.close()


def test_what_can_wait_is_done_in_idle_time_alone_until_there_is_none_left(peer: Peer, monkeypatch) -> None:
    monkeypatch.setattr(loop_module, "IDLE_WORK_AFTER_S", 0.0)
    left, done_while_idle = [3], []

    def piece() -> bool:
        done_while_idle.append(peer.core.idle)
        left[0] -= 1
        return left[0] > 0

    peer.core.in_idle_time = piece
    peer.say(add(1, [1, 2]))
    peer.work()
    assert not done_while_idle
    for _ in range(3):
        peer.loop.turn()
    assert done_while_idle == [True] * 3
    assert peer.loop._patience_s() is None


def test_loop_idle_engine_checks_its_cache_until_a_request_arrives(peer: Peer, monkeypatch) -> None:
    monkeypatch.setattr(loop_module, "IDLE_WORK_AFTER_S", 0.0)
    compared: list[str] = []

    def compare(tier: str, there: Mapping[str, Ids], here: Mapping[str, Ids]) -> dict[str, np.ndarray]:
        compared.append(tier)
        return {kind: np.zeros(len(ids), dtype=bool) for kind, ids in there.items()}

    core = peer.core
    core.checks = CacheChecks(core.scheduler, compare, per_minute=inf, now=0.0)
    prompt = [*range(1, 41)]  # more than one step of a check
    peer.say(add(1, prompt))
    peer.work()
    while not core.checks.computing:
        core.stats.last_step_at = -inf
        peer.loop.turn()
    assert core.stats.last_step_at > -inf, "the time before the check counts as one step's"
    peer.loop._audit_at = -inf
    while core.checks.computing:
        assert peer.loop._audit_at == -inf, "pages of a check are looked at as leaks"
        peer.loop.turn()
    while not compared:
        peer.loop.turn()
    assert core.scheduler.state(0.0).counters["leaked_pages"] == 0
    assert news(peer.heard()) == []
    while core.checks.busy:
        peer.loop.turn()
    while not core.checks.computing:
        peer.loop.turn()
    assert core.idle
    peer.say(GetState(serial=1), add(2, prompt, num_tokens=3))
    peer.loop.turn()
    assert not core.checks.computing
    assert tokens_of(peer.work(), 2) == reference(prompt, 3)
    assert core.scheduler.state(0.0).counters["requests"] == 2


def test_loop_idle_work_that_never_ends_takes_turns_with_checks_of_the_cache(peer: Peer, monkeypatch) -> None:
    monkeypatch.setattr(loop_module, "IDLE_WORK_AFTER_S", 0.0)
    happened: list[str] = []

    def piece() -> bool:
        happened.append("piece")
        return True

    def compare(tier: str, there: Mapping[str, Ids], here: Mapping[str, Ids]) -> dict[str, np.ndarray]:
        happened.append("slice")
        return {kind: np.zeros(len(ids), dtype=bool) for kind, ids in there.items()}

    core = peer.core
    core.in_idle_time = piece
    core.checks = CacheChecks(core.scheduler, compare, per_minute=inf, now=0.0)
    peer.say(add(1, [*range(1, 41)]))
    peer.work()
    for _ in range(40):
        peer.loop.turn()
    assert happened.count("slice") > 1
    assert happened.count("piece") >= happened.count("slice")


def test_idle_work_is_done_a_piece_at_a_time_and_gives_way_to_whoever_asks(peer: Peer, monkeypatch) -> None:
    monkeypatch.setattr(loop_module, "IDLE_WORK_AFTER_S", 0.0)
    happened: list[str] = []

    def piece() -> bool:
        happened.append("piece")
        peer.say(GetState(serial=len(happened)))
        if len(happened) == 3:
            peer.say(add(1, [1, 2], num_tokens=1))
        return True

    peer.core.in_idle_time = piece
    for _ in range(6):
        peer.loop.turn()
        happened += [type(frame).__name__ for frame in peer.heard()]
    assert happened == ["piece", "State", "piece", "State", "Updates", "piece", "State"]


def test_c25_a_load_is_no_hang_however_long_it_takes_but_one_tensor_may_be() -> None:
    now, seen = [100.0], []
    patient = changed(queue_timeout_s=NEVER_S, request_timeout_s=NEVER_S)
    peer = Peer(patient, clock=lambda: now[0])

    class Slow(NoMemory):
        def resume(self, tags: Collection[str], progress: Callable[[], None]) -> None:
            for seconds in (50.0, 70.0, 25.0):
                now[0] += seconds
                seen.append(peer.loop.beat())
                progress()

        def update(self, path: str | None, given: Mapping[str, Any], progress: Callable[[], None]) -> None:
            self.resume([], progress)

    peer.core.sleeper._memory = Slow()
    peer.say(Release(serial=1, tags=["weights"]), add(1, [1, 2], num_tokens=4))
    peer.loop.turn()
    now[0] += 500.0
    assert peer.loop.beat().step_age_s == 0  # somebody waits, but nothing is late
    peer.say(Resume(serial=2, tags=["weights"]))
    peer.loop.turn()
    assert peer.core.scheduler.queues.num_running == 1
    peer.say(UpdateWeights(serial=3, path="other", mode="retract"))
    peer.work()
    assert [told.turn_age_s for told in seen] == [50.0, 70.0, 25.0] * 2
    assert [told.step_age_s for told in seen] == [0.0, 0.0, 0.0, 50.0, 70.0, 25.0]
    assert peer.core.step_limit_s == STEP_LIMIT_S  # of the time that steps took: none by this clock
    peer.close()


def test_a_beat_says_how_long_the_loop_has_been_at_one_thing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked in the middle of what it does, as the thread does that sends them."""
    monkeypatch.setattr(loop_module, "IDLE_WORK_AFTER_S", 0.0)
    now, seen = [100.0], []
    peer = Peer(clock=lambda: now[0])
    launch = peer.runner.launch

    def long_step(plan):
        now[0] += 25.0
        seen.append(peer.loop.beat())
        return launch(plan)

    def long_piece() -> bool:
        now[0] += 3.0
        seen.append(peer.loop.beat())
        return False

    assert peer.loop.beat() == beat()
    peer.runner.launch, peer.core.in_idle_time = long_step, long_piece
    peer.say(add(1, [1, 2], num_tokens=2))
    peer.work()
    peer.loop.turn()
    first, second, idle = seen
    assert first == beat(turn_age_s=25.0, step_age_s=25.0)
    assert second == beat(turn_age_s=25.0, step_age_s=25.0, step_limit_s=12.5)
    assert idle == beat(turn_age_s=3.0, step_limit_s=12.5)
    peer.say(GetState(serial=1))
    peer.loop.turn()
    peer.core.step()
    assert peer.loop.beat().step_age_s == 0
    peer.close()


def test_the_tree_is_told_in_parts_between_steps(peer: Peer) -> None:
    """One part for each question, whatever there is to do, and never a step less."""
    for i in range(3):
        peer.say(AddRequest(request_id=i, prompt_token_ids=[50 + i] * 20, params=SamplingParams(max_new_tokens=3)))
        peer.work()
    peer.say(AddRequest(request_id=9, prompt_token_ids=[1, 2, 3], params=SamplingParams(max_new_tokens=4)))
    peer.loop.turn()
    steps = peer.core.scheduler.pools.steps.launched
    peer.say(GetTree(serial=5, begin=True), GetTree(serial=6))
    peer.loop.turn()
    parts = [frame for frame in peer.heard() if isinstance(frame, TreePart)]
    assert peer.core.scheduler.pools.steps.launched == steps + 1
    assert [(part.answers, len(part.branches), part.more) for part in parts] == [(5, 4, False), (6, 0, False)]
