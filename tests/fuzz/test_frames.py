"""The wire between the two processes: whatever bytes a peer sends, frames of the union or one typed fault; and whatever
a frame asks for, the engine's core goes on."""

from __future__ import annotations

import logging
import random
import struct
from typing import Any

import msgspec
import pytest

from forebay.base.loop_clock import LoopClock
from forebay.engine.channel import ChannelError, FrameDecoder, FrameEncoder
from forebay.engine.client.async_engine import AsyncEngine
from forebay.engine.client.link import EngineLink, _Protocol
from forebay.engine.frames import (
    AbortRequest,
    AddEndTokens,
    AddRequest,
    Beat,
    Configure,
    Dead,
    FlushCache,
    FromEngine,
    GetState,
    GetTree,
    Ready,
    Shutdown,
    State,
    ToEngine,
    TreePart,
    Updates,
)
from forebay.memory.radix_node import Branch
from forebay.requests.sampling_params import SamplingParams
from forebay.requests.step_plan import TokenLogprob
from forebay.requests.updates import (
    CacheReport,
    Failure,
    FinishReason,
    MemoryReport,
    MissReason,
    SpeculationReport,
    Update,
)
from forebay.scheduler.state import PoolState
from tests.engine.engine_fakes import CONFIG, READY, ScriptedEngine, fake_core, state
from tests.fuzz.mutants import fuzz, mutated, outcome, pieces, seeds

PARAMS = SamplingParams(max_tokens=4, logit_bias={5: 1.5}, stop_token_ids=(1, 2), seed=2**62, logprobs=2, top_p=0.5)
TO_ENGINE: list[msgspec.Struct] = [
    AddRequest(request_id=1, prompt_token_ids=[1, 2, 3], params=PARAMS, namespace="a", priority=-1, resume_points=[2]),
    AddRequest(request_id=2, prompt_token_ids=[5] * 40, params=SamplingParams(max_tokens=3, prompt_logprobs=1)),
    AbortRequest(request_id=2**40),
    AddEndTokens([2, 3]),
    FlushCache(serial=3),
    GetState(serial=7),
    GetTree(serial=8, begin=True),
    Shutdown(),
    Configure(CONFIG),
]
SCORE = TokenLogprob(5, -0.5, 1, [5, 6], [-0.5, -1.5])
NEWS = [
    Update(1, [5]),
    Update(
        2,
        [6],
        logprobs=[SCORE],
        prompt_logprobs=[None, SCORE],
        cache=CacheReport(3, MissReason.EVICTED, 4, {"state": 4}),
    ),
    Update(1, [7], finish=FinishReason.STOP, matched_stop=7, speculation=SpeculationReport(1.5, 1.25)),
    Update(1, [], finish=FinishReason.LENGTH, memory=MemoryReport(1, 20, [16, 32])),
    Update(2, [], finish=FinishReason.ERROR, failure=Failure("EngineError", "step_failed", "a step failed")),
]
POOL = PoolState(name="kv", total=9, free=9, running=0)
FROM_ENGINE: list[msgspec.Struct] = [
    READY,
    Updates.pack(NEWS),
    Updates.pack(NEWS[:1]),
    Updates.pack([Update(1, [5, 6, 7]), Update(3, [8])]),
    state(counters={"steps": 1.0}, answers=1, pools=[POOL]),
    TreePart(1, [Branch(b"12345678", b"", "0/", "", 1, 0, 2, 0.5, [1], b"1234")], ["state"], more=True),
    Beat(turn_age_s=0.0, step_age_s=0.5, step_limit_s=60.0),
    Dead(failure=Failure("EngineError", "engine_dead", "killed")),
]
KINDS = {ToEngine: TO_ENGINE, FromEngine: FROM_ENGINE}


def stream_of(frames: list[msgspec.Struct]) -> bytes:
    encoder = FrameEncoder()
    return b"".join(bytes(encoder.encode(frame)) for frame in frames)


def sound(bodies: list[bytes]) -> bytes:
    """Frames of those bodies, lengths and numbers right."""
    return b"".join(struct.pack("<II", len(body), number) + body for number, body in enumerate(bodies))


def body_of(frame: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(frame)


def make_stream(frames: list[msgspec.Struct], rng: random.Random) -> list[bytes]:
    """A stream and ways to cut it: broken anywhere, or in its bodies only."""
    some = rng.choices(frames, k=rng.randint(1, 4))
    if rng.random() < 0.4:
        data = mutated(rng, [stream_of(some)])
    else:
        data = sound([mutated(rng, [body_of(frame)]) for frame in some])
    return [data, *pieces(rng, data)]


def read(union: Any, parts: list[bytes]) -> tuple[list[Any], str]:
    """The frames of a stream, and what was wrong with it."""
    decoder: FrameDecoder[Any] = FrameDecoder(union)
    frames = []
    for part in parts:
        got = outcome(ChannelError, decoder.feed, part)
        if isinstance(got, ChannelError):
            again = outcome(ChannelError, decoder.feed, b"")
            assert isinstance(again, ChannelError)
            return frames, got.message
        frames += got
    return frames, ""


def check_stream(union: Any, case: list[bytes]) -> None:
    data, *cut = case
    known = tuple(type(frame) for frame in KINDS[union])
    frames, fault = read(union, cut)
    assert all(isinstance(frame, known) for frame in frames)
    one_by_one, same_fault = read(union, [data[i : i + 1] for i in range(len(data))])
    assert fault == same_fault
    # What came in one piece with the fault is lost.
    assert repr(one_by_one[: len(frames)] if fault else one_by_one) == repr(frames)


@pytest.mark.parametrize("union", KINDS, ids=["to_engine", "from_engine"])
@pytest.mark.parametrize("seed", seeds(1, 60))
def test_d7_a_stream_of_frames_reads_the_same_however_it_is_cut(seed: int, union: Any) -> None:
    fuzz(seed, 300, lambda rng: make_stream(KINDS[union], rng), lambda case: check_stream(union, case))


def sent_whole(rng: random.Random) -> list[msgspec.Struct]:
    return rng.choices([*TO_ENGINE], k=rng.randint(1, 5))


@pytest.mark.parametrize("seed", seeds(1, 10))
def test_d7_what_is_sent_arrives_equal(seed: int) -> None:
    def check(frames: list[msgspec.Struct]) -> None:
        assert read(ToEngine, pieces(random.Random(seed), stream_of(frames))) == (frames, "")

    fuzz(seed, 200, sent_whole, check)


# -- what the frames ask for --------------------------------------------------------------------------------------

NUMBERS = [-(2**63), -(2**31), -1, 0, 1, 2, 3, 255, 256, 999, 1000, 2**31, 2**63 - 1]
FLOATS = [float("nan"), float("inf"), -float("inf"), -1.0, -0.0, 0.0, 1e-300, 0.5, 1.0, 2.0, 100.0, 1e308]


def make_request(rng: random.Random) -> list[AddRequest]:
    """Requests as no server of ours would send them: each value right or of the wildest kind."""

    def number(usual: int) -> int:
        return rng.choice([usual, usual, usual, rng.choice(NUMBERS)])

    def real(usual: float) -> float:
        return rng.choice([usual, usual, usual, rng.choice(FLOATS)])

    def one(request_id: int) -> AddRequest:
        prompt = [number(rng.randrange(1000)) for _ in range(rng.choice([0, 1, 3, 4, 40, 255, 256, 257]))]
        params = msgspec.structs.replace(
            SamplingParams(),  # as a frame may have them that nobody constructed
            max_tokens=number(rng.randint(1, 20)),
            temperature=real(0.0),
            top_k=number(0),
            top_p=real(1.0),
            min_p=real(0.0),
            repetition_penalty=real(1.0),
            presence_penalty=real(0.0),
            frequency_penalty=real(0.0),
            logit_bias={number(5): real(1.0)} if rng.random() < 0.3 else {},
            seed=number(0),
            stop_token_ids=tuple(number(7) for _ in range(rng.choice([0, 0, 1, 3, 300]))),
            ignore_eos=rng.random() < 0.5,
            logprobs=number(-1),
            prompt_logprobs=number(-1),
        )
        return AddRequest(
            request_id=request_id,
            prompt_token_ids=prompt,
            params=params,
            priority=number(0),
            namespace=rng.choice(["", "a", "\0" * 100]),
            resume_points=[number(2) for _ in range(rng.choice([0, 0, 2, 50]))],
        )

    return [one(rng.choice([number + 1, 1])) for number in range(rng.randint(1, 4))]


def check_requests(case: list[AddRequest]) -> None:
    core, _ = fake_core()
    ended: dict[int, int] = {}
    for wanted in case:
        for update in core.add(wanted):
            assert update.failure is not None
            assert update.failure.code != "step_failed", "refused by a fault of ours and not by a check"
    waiting = set(core.scheduler.requests)
    for _ in range(3000):
        if core.idle:
            break
        for update in core.step():
            if update.finish is not None:
                ended[update.request_id] = ended.get(update.request_id, 0) + 1
    assert core.idle
    assert ended == dict.fromkeys(waiting, 1)
    assert core.stats.counters["engine.step_failures"] == 0
    pools = core.scheduler.pools
    assert pools.kv.num_free + pools.cache.num_pages == pools.kv.capacity


@pytest.mark.parametrize("seed", seeds(1, 60))
def test_d7_no_request_can_stop_the_core(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="forebay")
    fuzz(seed, 100, make_request, check_requests)


@pytest.mark.parametrize("seed", seeds(1, 60))
async def test_d7_news_of_any_kind_leave_the_servers_side_whole(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Mutated bytes from the engine: delivered, ignored, or the engine is declared dead; nothing else is raised."""
    caplog.set_level(logging.CRITICAL, logger="forebay")
    clock = LoopClock()

    def check(case: list[bytes]) -> None:
        process = ScriptedEngine()
        process.die()
        link = EngineLink(process, clock)  # type: ignore[arg-type]
        link._transport = Deaf()  # type: ignore[assignment]
        engine, protocol = AsyncEngine(link), _Protocol(link)
        protocol.data_received(stream_of([READY]))
        streams = [engine.submit(prompt_token_ids=[1], params=PARAMS) for _ in range(2)]
        for part in case[1:]:
            if not link._transport.aborted:  # type: ignore[attr-defined]
                protocol.data_received(part)
        ends = [stream._mailbox.closed for stream in streams]
        assert link.dead is None or all(ends)
        link._died_of(Failure("EngineError", "over", "the test is over"))
        assert all(stream._mailbox.closed for stream in streams)
        process.stop(0)

    def make(rng: random.Random) -> list[bytes]:
        bodies = [mutated(rng, [body_of(frame)]) for frame in rng.choices(FROM_ENGINE[1:], k=rng.randint(1, 4))]
        data = sound([body_of(READY), *bodies])[8 + len(body_of(READY)) :]
        return [data, *pieces(rng, data)]

    fuzz(seed, 100, make, check)


class Deaf:
    """A transport that goes nowhere."""

    def __init__(self) -> None:
        self.aborted = False

    def write(self, data: bytes) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True

    def get_write_buffer_size(self) -> int:
        return 0


assert {Ready, State} <= {type(frame) for frame in FROM_ENGINE}
