"""Parts of the dialects on their own: what moves to a worker thread, what is summed up, and whose names errors have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forebay.base.errors import InvalidRequest
from forebay.requests.updates import CacheReport, MemoryReport
from forebay.server.api import fields_by_route
from forebay.server.api.anthropic.messages_request import MessagesRequest
from forebay.server.api.core import dialect, generation, pooled
from forebay.server.api.core.dialect import Collector, EventWriter, collect
from forebay.server.api.core.generation import CachedDetails, cache_usage
from forebay.server.api.core.items import Call, items_of
from forebay.server.api.core.pooling import Batch, Vector
from forebay.server.api.core.renaming import by_type, renamed
from forebay.server.api.fields_by_route import Fate, fate
from forebay.server.api.llama.request import LlamaCompletionRequest
from forebay.server.api.ollama import embeddings as ollama_embeddings
from forebay.server.api.openai import compaction
from forebay.server.api.openai import embeddings as openai_embeddings
from forebay.server.api.openai.background import Background
from forebay.server.api.openai.response_store import ResponseStore
from forebay.server.protocol.requests import CompletionRequest
from forebay.text.answers.parts import CallArguments, CallBegun, CallEnded, Said, Thought


class Workers:
    """Counts the calls that move to a thread."""

    def __init__(self) -> None:
        self.count = 0

    async def run(self, client: object, call: Callable[[], Any]) -> Any:
        self.count += 1
        return call()


@pytest.mark.parametrize(("num_scores", "moved"), [(1024, 0), (1025, 1)])
def test_answer_with_more_than_1024_log_probabilities_is_written_by_a_worker(num_scores: int, moved: int) -> None:
    class Whole:
        def whole(self, *_: object) -> bytes:
            return b"{}"

    async def ended() -> None: ...

    workers = Workers()
    server: Any = SimpleNamespace(json_workers=workers, client=None)
    made: Any = SimpleNamespace(
        choices=[1], deliver=lambda sink: None, ended=ended, disconnected=False, num_scores=num_scores
    )
    assert asyncio.run(collect(server, Whole(), made)) == b"{}"  # type: ignore[arg-type]
    assert workers.count == moved


@pytest.mark.parametrize(("count", "moved"), [(16_384, 0), (16_385, 1)])
@pytest.mark.parametrize("route", ["/v1/embeddings", "/api/embed"])
def test_vectors_of_more_than_16384_numbers_are_written_by_a_worker(
    route: str, count: int, moved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = pooled.PooledUsage(
        prompt_tokens=3,
        total_tokens=3,
        prompt_tokens_details=CachedDetails(cached_tokens=0),
        weight_version=0,
        cache=None,  # type: ignore[arg-type]
    )

    async def embedded(*_: object) -> Any:
        return [np.zeros(count - 1, dtype=np.float32), np.zeros(1, dtype=np.float32)], usage

    async def read_body(*_: object) -> Any:
        return SimpleNamespace(
            model="m", model_name="m", embedding=None, encoding_format="base64", output_dtype="float"
        )

    module: Any = openai_embeddings if route == "/v1/embeddings" else ollama_embeddings
    context = SimpleNamespace(arrived_at=0.0, model="m")
    monkeypatch.setattr(module, "RequestContext", SimpleNamespace(of=lambda scope: context))
    monkeypatch.setattr(module, "embedded", embedded)
    monkeypatch.setattr(module, "read_body", read_body)
    workers = Workers()
    server: Any = SimpleNamespace(json_workers=workers, client=None, check_model=lambda *_: None)
    handler = module.embeddings if route == "/v1/embeddings" else module.ollama_embed
    monkeypatch.setattr(module.msgspec.json, "encode", lambda answer: b"{}")
    asyncio.run(handler(SimpleNamespace(scope={}), server))
    assert workers.count == moved


def test_silent_stream_is_looked_at_every_7_and_a_half_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """So no two bytes of it are 15 s apart."""
    waits: list[float] = []
    written: list[bytes] = []
    monkeypatch.undo()
    monkeypatch.setattr(dialect, "KEEP_ALIVE_S", 15.0)
    loop = SimpleNamespace(call_later=lambda seconds, call: waits.append(seconds))
    monkeypatch.setattr(dialect.asyncio, "get_running_loop", lambda: loop)
    connection: Any = SimpleNamespace(write_chunk=lambda events: written.append(events) or True)
    writer = EventWriter(connection, SimpleNamespace(keep_alive=b": keep-alive\n\n"), None, _kept=None)  # type: ignore[arg-type]
    writer._watch()
    writer._keep_alive()
    writer._write(b"data")
    writer._keep_alive()
    writer._keep_alive()
    assert waits == [7.5] * 4
    assert written == [b": keep-alive\n\n", b"data", b": keep-alive\n\n"]


def test_stream_whose_client_is_gone_disconnects_its_generation() -> None:
    ends: list[str] = []
    connection: Any = SimpleNamespace(write_chunk=lambda events: False)
    found: Any = SimpleNamespace(disconnect=lambda: ends.append("gone"))
    writer = EventWriter(connection, SimpleNamespace(keep_alive=b""), found, _kept=None)  # type: ignore[arg-type]
    writer._write(b"")
    assert ends == []
    writer._write(b"data")
    assert ends == ["gone"]


def test_collector_forgets_a_choice_that_begins_again() -> None:
    made = Collector(2)
    choices: list[Any] = [
        SimpleNamespace(index=index, prompt=SimpleNamespace(reading=index or None)) for index in (0, 1)
    ]
    for choice in choices:
        made.text(choice, "a")
        made.piece(choice, SimpleNamespace(text="b", parts=[Said("b")], tokens=["score"]))  # type: ignore[arg-type]
    assert made.parts == [[Said("b")], [Said("a"), Said("b")]]
    made.restart(choices[0])
    assert (made.texts, made.scores) == ([[], ["a", "b"]], [[], ["score"]])
    assert made.parts[0] == []


def test_items_join_neighbours_of_a_kind_and_the_pieces_of_a_call() -> None:
    parts = [
        *(Thought("a"), Thought("b"), Said("c"), Said("d")),
        *(CallBegun(0, "f"), CallArguments(0, "{"), CallArguments(0, "}"), CallEnded(0)),
        *(CallBegun(1, "g"), CallEnded(1), Said("e")),
    ]
    assert items_of(parts) == [Thought("ab"), Said("cd"), Call("f", "{}"), Call("g", ""), Said("e")]


def report(**changes: Any) -> CacheReport:
    return CacheReport(**changes)


def test_cache_usage_sums_tokens_and_takes_the_rest_of_the_first_prompt() -> None:
    first = report(cached_tokens=4, kv_tokens=8, resumable={"state": 6}, tiers={"host": 3})
    second = report(cached_tokens=10, kv_tokens=20, resumable={"state": 16}, tiers={"host": 5})
    memories = [
        MemoryReport(retractions=1, recomputed_tokens=7, checkpoints=[1]),
        MemoryReport(retractions=2, recomputed_tokens=30, checkpoints=[2]),
    ]
    usage = cache_usage([first, second], None, memories)  # type: ignore[arg-type]
    assert (usage.cached_tokens, usage.matched_tokens) == (14, {"kv": 28, "state": 22})
    assert (usage.retractions, usage.recomputed_tokens, usage.checkpoints, usage.differs) == (3, 37, [1], None)
    assert usage.tiers["host"] == 8


@pytest.mark.parametrize(("differs_at", "told"), [(-1, False), (0, True), (5, True)])
def test_cache_usage_tells_a_difference_from_the_first_token_on(
    differs_at: int, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "_difference", lambda *_: {"position": differs_at})
    assert (cache_usage([report(differs_at=differs_at)], None).differs is not None) is told  # type: ignore[arg-type]


def test_pooled_usage_is_of_all_prompts_and_the_latest_weights() -> None:
    batch = Batch(lambda ids: None, [[1, 2], [3]])  # type: ignore[arg-type,return-value]
    batch.vectors = {1: Vector(b"", report(cached_tokens=1), 5), 0: Vector(b"", report(cached_tokens=2), 3)}
    server: Any = SimpleNamespace(tokenizer=SimpleNamespace(table=None))
    context: Any = SimpleNamespace(adapter="", note_cache=lambda *_: None)
    usage = pooled._usage(server, context, batch)
    assert (usage.prompt_tokens, usage.total_tokens, usage.weight_version) == (3, 3, 5)
    assert usage.prompt_tokens_details == CachedDetails(cached_tokens=3)


# Names.


@pytest.mark.parametrize(
    ("param", "own"),
    [
        ("max_tokens", "n_predict"),
        ("prompt", "input"),
        ("prompt.0", "input.0"),
        ("prompts", "prompts"),  # another field
        ("messages.3.content", "turns.3.content"),
    ],
)
def test_refusal_has_the_names_of_the_client_s_own_body(param: str, own: str) -> None:
    names = {"max_tokens": "n_predict", "prompt": "input", r"messages\.(\d+)": r"turns.\1"}
    with pytest.raises(InvalidRequest) as refused, renamed(names):
        raise InvalidRequest(f"{param} is wrong", param=param)
    assert (refused.value.param, refused.value.message) == (own, f"{own} is wrong")


def test_refusal_of_no_field_keeps_its_words() -> None:
    with pytest.raises(InvalidRequest, match="prompt is wrong") as refused, renamed({"prompt": "input"}):
        raise InvalidRequest("prompt is wrong")
    assert refused.value.param is None


def test_union_is_chosen_by_its_type() -> None:
    choose: Any = by_type("text", "image", default="text").discriminator
    found = [choose(value) for value in ({"type": "image"}, {}, {"type": 5}, {"type": "video"}, "a")]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0] != found[1]
    assert found[2:] == [None, None, None]


def test_fate_of_a_field_is_read_off_the_bodies() -> None:
    assert fate(CompletionRequest, "max_tokens") is Fate.TAKEN
    assert fate(LlamaCompletionRequest, "n_predict") is Fate.TAKEN
    assert fate(MessagesRequest, "best_of") is Fate.REFUSED
    fates = dict(fields_by_route.rows())
    assert "messages" not in fates
    assert "bootstrap_room" not in fates
    assert fates["temperature"]["/v1/chat/completions"] is Fate.TAKEN
    assert all(set(each.values()) != {Fate.REFUSED} for each in fates.values())


# Responses.


def test_store_keeps_a_response_of_exactly_its_bytes() -> None:
    tenant: Any = SimpleNamespace(digest="one")
    response = {"id": "a", "output": []}
    probe = ResponseStore(1 << 20)
    probe.put(tenant, response, [])
    size = probe.get(tenant, "a").num_bytes
    for max_bytes, kept in ((size, True), (size - 1, False)):
        store = ResponseStore(max_bytes)
        store.put(tenant, response, [])
        assert ("a" in store._shelves["one"].responses) is kept
        assert store._shelves["one"].num_bytes == size * kept
    assert (ResponseStore(1).is_on, ResponseStore(0).is_on) == (True, False)


@pytest.mark.parametrize(("num_tokens", "compacts"), [(700, False), (701, True)])
@pytest.mark.parametrize("threshold", [None, 700])
def test_conversation_beyond_seven_eighths_of_the_context_is_compacted(
    threshold: int | None, num_tokens: int, compacts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Compacts(Exception):
        pass

    async def chat_ids(*_: object) -> list[int]:
        return [0] * num_tokens

    def expanded(*_: object) -> None:
        raise Compacts

    monkeypatch.setattr(compaction, "chat_ids", chat_ids)
    monkeypatch.setattr(compaction, "expanded", expanded)
    info = SimpleNamespace(context_length=800 if threshold is None else 10_000)
    model = SimpleNamespace(mode=compaction.DisaggregationMode.NULL)
    server: Any = SimpleNamespace(engine=SimpleNamespace(info=info), model=model, seals=None)
    body: Any = SimpleNamespace(context_management=[SimpleNamespace(compact_threshold=threshold)], chat_of=None)
    chat: Any = SimpleNamespace(messages=[])
    made = compaction.compacted_beyond(server, SimpleNamespace(tenant=None), body, chat, [])  # type: ignore[arg-type]
    if compacts:
        with pytest.raises(Compacts):
            asyncio.run(made)
    else:
        assert asyncio.run(made) == (chat, [])


@pytest.mark.parametrize("ends", ["answer", "error", "bug"])
def test_background_response_is_forgotten_when_it_ends(ends: str) -> None:
    told: list[tuple[str, Any]] = []

    async def answer(client: Any) -> None:
        if ends == "error":
            raise InvalidRequest("wrong", code="odd")
        if ends == "bug":
            raise KeyError("bug")

    async def run() -> None:
        jobs, tenant = Background(), SimpleNamespace(digest="d", name="t")
        jobs.start(tenant, "r", answer, 0.0, lambda status, error: told.append((status, error)))  # type: ignore[arg-type]
        assert [*jobs._jobs] == [("d", "r")]
        task = jobs._jobs["d", "r"].task
        assert task is not None
        await task
        assert jobs._jobs == {}
        assert await jobs.cancel(tenant, "r") is False  # type: ignore[arg-type]

    asyncio.run(run())
    statuses = [(status, error and error["code"]) for status, error in told]
    assert statuses == {"answer": [], "error": [("failed", "odd")], "bug": [("failed", "internal_error")]}[ends]
