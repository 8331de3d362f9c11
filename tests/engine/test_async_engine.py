"""The server's side of the channel, with the test playing the engine: every stream ends exactly once."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Awaitable, Callable

import pytest

from forebay.base.errors import ModelError, Overloaded, PayloadTooLarge, Unavailable
from forebay.engine import channel as channel_module
from forebay.engine import stream as stream_module
from forebay.engine.client.async_engine import AsyncEngine
from forebay.engine.client.link import EXIT_GRACE_S
from forebay.engine.frames import (
    KV_CACHE,
    TAGS,
    WEIGHTS,
    AbortRequest,
    AddRequest,
    Dead,
    FlushCache,
    GetState,
    Occupied,
    Resume,
    Shutdown,
    Updates,
)
from forebay.engine.lifecycle.launch import describe_exit
from forebay.engine.stream import Stream
from forebay.requests.step_plan import TokenLogprob
from forebay.requests.updates import Failure, FinishReason, Update
from tests.deadlines import HANGS_S
from tests.engine.engine_fakes import READY, ScriptedEngine, state
from tests.engine.scenes import PARAMS, collect, play, submit, tokens


def test_a_request_reaches_the_engine_and_its_tokens_come_back_in_order() -> None:
    async def scene(engine: AsyncEngine, peer: ScriptedEngine) -> None:
        stream = engine.submit(
            prompt_token_ids=[4, 5], params=PARAMS, priority=3, namespace="tenant", resume_points=(1,)
        )
        frame = await peer.heard(AddRequest)
        assert frame.resume_points == [1]
        assert (frame.prompt_token_ids, frame.params, frame.priority, frame.namespace) == ([4, 5], PARAMS, 3, "tenant")
        peer.say(tokens(frame.request_id, 1))
        peer.say(tokens(frame.request_id, 2, 3, finish=FinishReason.LENGTH))
        updates = await collect(stream)
        assert [token for update in updates for token in update.token_ids] == [1, 2, 3]
        assert [update.finish for update in updates if update.finish] == [FinishReason.LENGTH]
        assert engine.link.num_requests == 0

    play(scene)


class Taker:
    """A `Receiver` that remembers."""

    def __init__(self) -> None:
        self.taken: list[Update] = []

    def tokens(self, token_ids: list[int]) -> None:
        self.taken.append(Update(0, token_ids))

    def update(self, update: Update) -> None:
        self.taken.append(update)

    @property
    def token_ids(self) -> list[int]:
        return [token for update in self.taken for token in update.token_ids]


def test_a_receiver_gets_what_was_here_and_then_all_that_comes_in_order() -> None:
    async def scene(engine: AsyncEngine, peer: ScriptedEngine) -> None:
        stream, other, taker = submit(engine), submit(engine), Taker()
        peer.say(tokens(stream.request_id, 1))
        peer.say(tokens(other.request_id, 1, finish=FinishReason.STOP))
        await collect(other)
        stream.deliver(taker)
        assert taker.token_ids == [1]
        peer.say(Updates.pack([Update(stream.request_id, [2]), Update(stream.request_id, [3])]))
        peer.say(tokens(stream.request_id, 4, finish=FinishReason.LENGTH))
        await engine_idle(engine)
        assert taker.token_ids == [1, 2, 3, 4]
        assert [update.finish for update in taker.taken] == [None, None, None, FinishReason.LENGTH]

    play(scene)


def test_a_receiver_has_its_tokens_in_the_turn_in_which_they_arrive() -> None:
    """No task runs between a frame's arrival and its last token's delivery, however many streams it feeds."""

    async def scene(engine: AsyncEngine, peer: ScriptedEngine) -> None:
        streams = [submit(engine) for _ in range(READY.max_running_requests)]
        takers = [Taker() for _ in streams]
        for stream, taker in zip(streams, takers, strict=True):
            stream.deliver(taker)
        peer.say(Updates.pack([Update(stream.request_id, [stream.request_id]) for stream in streams]))
        while not takers[0].taken:
            await asyncio.sleep(0)
        assert [taker.token_ids for taker in takers] == [[stream.request_id] for stream in streams]

    play(scene)


def test_the_engines_death_reaches_a_receiver_as_its_last_update() -> None:
    async def scene(engine: AsyncEngine, peer: ScriptedEngine) -> None:
        stream, taker = submit(engine), Taker()
        stream.deliver(taker)
        peer.die()
        await engine.link.died()
        (last,) = taker.taken
        assert last.failure is not None
        assert last.failure.code == "engine_dead"

    play(scene)


def test_updates_that_outrun_their_reader_are_merged_and_none_is_lost() -> None:
    async def scene(engine: AsyncEngine, peer: ScriptedEngine) -> None:
        stream = submit(engine)
        frame = await peer.heard(AddRequest)
        for token in range(100):
            entry = [TokenLogprob(token, -0.5, 1)]
            peer.say(Updates(updates=[Update(request_id=frame.request_id, token_ids=[token], logprobs=entry)]))
        peer.say(tokens(frame.request_id, finish=FinishReason.STOP))
        updates = await collect(stream)
        assert [token for update in updates for token in update.token_ids] == list(range(100))
        assert [e.token_id for update in updates for e in update.logprobs or []] == list(range(100))

    play(scene)


def test_a_reader_that_falls_too_far_behind_is_cut_off_with_a_typed_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stream_module, "MAX_PENDING", 50)

    async def scene(engine: AsyncEngine, peer: ScriptedEngine) -> None:
        slow, quick = submit(engine), submit(engine)
        for _ in range(2):
            await peer.heard(AddRequest)
        for _ in range(60):
            peer.say(tokens(slow.request_id, 7))
        assert (await peer.heard(AbortRequest)).request_id == slow.request_id
        peer.say(tokens(quick.request_id, 1, finish=FinishReason.STOP))
        (last,) = await collect(slow)
        assert last.failure is not None
        assert last.failure.code == "slow_consumer"
        assert f"slow_consumer_cut id={slow.request_id}" in caplog.messages
        assert (await collect(quick))[-1].finish is FinishReason.STOP

    play(scene)


def test_the_log_probabilities_of_a_long_prompt_do_not_count_as_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "MAX_PENDING", 50)

    async def scene(engine: AsyncEngine, peer: ScriptedEngine) -> None:
        stream = submit(engine)
        entries = [TokenLogprob(i, -1.0, 1, [1, 2], [-1.0, -2.0]) for i in range(100)]
        last = Update(stream.request_id, [1], finish=FinishReason.STOP, prompt_logprobs=list(entries))
        peer.say(Updates(updates=[last]))
        assert await collect(stream) == [last]

    play(scene)


@pytest.mark.parametrize("words", [True, False], ids=["with last words", "without a word"])
def test_the_engines_death_ends_every_stream_once_with_a_typed_error(words: bool) -> None:
    async def scene(engine: AsyncEngine, peer: ScriptedEngine) -> None:
        streams = [submit(engine) for _ in range(5)]
        question = asyncio.ensure_future(engine.state())
        for _ in streams:
            await peer.heard(AddRequest)
        await peer.heard(GetState)
        peer.say(tokens(streams[0].request_id, 1, finish=FinishReason.STOP))
        if words:
            peer.say(Dead(failure=Failure("EngineError", "engine_broken", "the cause")))
        peer.die()
        ends = [(await collect(stream))[-1] for stream in streams]
        assert [end.finish for end in ends] == [FinishReason.STOP, *[FinishReason.ERROR] * 4]
        assert {end.failure.code for end in ends if end.failure} == {"engine_dead"}
        with pytest.raises(Unavailable):
            await question
        with pytest.raises(Unavailable) as refused:
            submit(engine)
        assert refused.value.code == "engine_dead"
        expected = "the cause" if words else f"the engine process {describe_exit(-9)}"
        assert (await engine.link.died()).message == expected

    play(scene, peer=ScriptedEngine(exit_code=-9))


def test_what_is_no_frame_counts_as_the_engines_death() -> None:
    async def scene(engine: AsyncEngine, peer: ScriptedEngine) -> None:
        stream = submit(engine)
        peer.say(GetState())
        assert (await collect(stream))[-1].failure is not None
        assert (await engine.link.died()).code == "channel_error"

    play(scene)


def test_a_failed_start_raises_the_engines_own_error() -> None:
    async def scene(engine: AsyncEngine, peer: ScriptedEngine) -> None:
        with pytest.raises(Unavailable) as early:
            submit(engine)
        assert early.value.code == "starting"
        peer.say(Dead(failure=Failure("ModelError", "invalid_model", "no such file")))
        with pytest.raises(ModelError, match="no such file"):
            await engine.ready()

    play(scene, ready=False)


async def _cancelled(stream: Stream) -> None:
    task = asyncio.ensure_future(collect(stream))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _closed(stream: Stream) -> None:
    async with stream:
        pass


async def _aborted_twice(stream: Stream) -> None:
    stream.abort()
    stream.abort()


LEAVING: dict[str, Callable[[Stream], Awaitable[None]]] = {
    "cancelling": _cancelled,
    "leaving the block": _closed,
    "aborting": _aborted_twice,
}


@pytest.mark.parametrize("leave", LEAVING.values(), ids=LEAVING.keys())
def test_leaving_a_stream_aborts_its_request(leave: Callable[[Stream], Awaitable[None]]) -> None:
    async def scene(engine: AsyncEngine, peer: ScriptedEngine) -> None:
        stream = submit(engine)
        await peer.heard(AddRequest)
        await leave(stream)
        assert (await peer.heard(AbortRequest)).request_id == stream.request_id
        peer.say(tokens(stream.request_id, finish=FinishReason.ABORT))
        await engine_idle(engine)
        stream.abort()
        question = asyncio.ensure_future(engine.state())
        peer.say(state(answers=(await peer.heard(GetState)).serial))
        await question

    play(scene)


@pytest.mark.long
def test_dropping_a_stream_aborts_its_request() -> None:
    async def scene(engine: AsyncEngine, peer: ScriptedEngine) -> None:
        stream = submit(engine)
        request_id = (await peer.heard(AddRequest)).request_id
        del stream
        gc.collect()
        assert (await peer.heard(AbortRequest)).request_id == request_id

    play(scene)


async def engine_idle(engine: AsyncEngine) -> None:
    while engine.link.num_requests:
        await asyncio.sleep(0)


def test_answers_find_their_questions_among_unasked_states() -> None:
    async def scene(engine: AsyncEngine, peer: ScriptedEngine) -> None:
        flush = asyncio.ensure_future(engine.flush_cache())
        serial = (await peer.heard(FlushCache)).serial
        look = asyncio.ensure_future(engine.state())
        peer.say(state(step=1))
        peer.say(state(step=3, answers=(await peer.heard(GetState)).serial))
        peer.say(state(step=2, answers=serial))
        assert ((await flush).step, (await look).step) == (2, 3)
        assert engine.link.last_state is not None

    play(scene)


def test_resting_and_waking_follow_the_weights_tag_alone() -> None:
    heard: list[str] = []

    async def scene(engine: AsyncEngine, peer: ScriptedEngine) -> None:
        async def told(step: int, *released: str) -> None:
            asking = asyncio.ensure_future(engine.state())
            serial = (await peer.heard(GetState)).serial
            peer.say(state(step=step, memory=Occupied(released=list(released)), answers=serial))
            await asking

        async def woken(*tags: str) -> None:
            asking = asyncio.ensure_future(engine.resume(tags))
            serial = (await peer.heard(Resume)).serial
            await asyncio.sleep(0)
            assert heard[-1] == ("wake" if WEIGHTS in tags else "rest"), "while the engine wakes"
            peer.say(state(answers=serial))
            await asking

        engine.link.on_sleep, engine.link.on_wake = lambda: heard.append("rest"), lambda: heard.append("wake")
        for step, released in enumerate([(), (KV_CACHE,), TAGS, TAGS, (WEIGHTS,), (), TAGS]):
            await told(step, *released)

        assert heard == ["rest", "rest"]
        await woken(KV_CACHE)
        await woken(*TAGS)

    play(scene)
    assert heard == ["rest", "rest", "wake"]


def test_more_requests_than_can_run_and_queue_are_refused_at_once() -> None:
    async def scene(engine: AsyncEngine, peer: ScriptedEngine) -> None:
        streams = [submit(engine) for _ in range(READY.max_requests)]
        with pytest.raises(Overloaded, match="40 requests run or wait; at most 40"):
            submit(engine)
        peer.say(tokens(streams[0].request_id, finish=FinishReason.STOP))
        await collect(streams[0])
        streams.append(submit(engine))

    play(scene)


def test_a_prompt_that_no_frame_holds_is_refused_and_the_next_one_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_module, "MAX_FRAME_BYTES", 1000)

    async def scene(engine: AsyncEngine, peer: ScriptedEngine) -> None:
        with pytest.raises(PayloadTooLarge, match="2000 tokens"):
            submit(engine, list(range(2000)))
        stream = submit(engine)
        peer.say(tokens((await peer.heard(AddRequest)).request_id, finish=FinishReason.STOP))
        await collect(stream)

    play(scene)


def test_closing_lets_requests_finish_and_refuses_new_ones() -> None:
    async def scene(engine: AsyncEngine, peer: ScriptedEngine) -> None:
        stream = submit(engine)
        await peer.heard(AddRequest)
        closing = asyncio.ensure_future(engine.close(drain_s=HANGS_S))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable) as refused:
            submit(engine)
        assert refused.value.code == "draining"
        peer.say(tokens(stream.request_id, 1, finish=FinishReason.STOP))
        assert (await collect(stream))[-1].finish is FinishReason.STOP
        await closing
        await peer.heard(Shutdown)

    play(scene)


@pytest.mark.parametrize("ready", [True, False])
def test_only_an_engine_that_is_up_has_time_to_end_by_itself(ready: bool) -> None:
    async def scene(engine: AsyncEngine, peer: ScriptedEngine) -> None:
        await engine.close(drain_s=0.0)
        assert peer.grace_s == (EXIT_GRACE_S if ready else 0.0)
        await engine.close(drain_s=0.0)

    play(scene, ready=ready)


def test_closing_fails_what_did_not_finish_in_time() -> None:
    async def scene(engine: AsyncEngine, peer: ScriptedEngine) -> None:
        stream = submit(engine)
        await engine.close(drain_s=0.0)
        (last,) = await collect(stream)
        assert last.failure is not None
        assert last.failure.code == "shutting_down"

    play(scene)


@pytest.mark.parametrize("seed", range(30))
def test_every_stream_ends_exactly_once_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)

    async def scene(engine: AsyncEngine, peer: ScriptedEngine) -> None:
        streams = [submit(engine) for _ in range(20)]
        collected = [asyncio.ensure_future(collect(stream)) for stream in streams]
        live = [(await peer.heard(AddRequest)).request_id for _ in streams]
        dies_at = rng.randrange(120)
        for moment in range(100):
            if moment == dies_at:
                peer.die()
                break
            if rng.random() < 0.1:
                rng.choice(streams).abort()
            if live:
                request_id = rng.choice(live)
                finish = rng.choice([None, None, None, *FinishReason])
                if finish:
                    live.remove(request_id)
                peer.say(tokens(request_id, moment, finish=finish))
            await asyncio.sleep(0)
        if moment < dies_at:
            for request_id in live:
                peer.say(tokens(request_id, finish=FinishReason.STOP))
        for updates in await asyncio.gather(*collected):
            assert [bool(update.finish) for update in updates] == [False] * (len(updates) - 1) + [True]

    play(scene)
