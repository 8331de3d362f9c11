"""Responses that the server stores, as the official client names them again (C29: each key has its own)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import openai
import pytest

from forebay.base.errors import NotFound
from forebay.config.engine_config import DisaggregationMode
from forebay.http.security import Tenant
from forebay.server.api.openai.response_store import ResponseStore
from tests import loopback
from tests.deadlines import HANGS_S
from tests.server.conftest import MODEL, Running
from tests.server.fake_engine import FakeEngine

ONE, OTHER = Tenant("one"), Tenant("other")


def connect(server: Running, key: str = "x") -> openai.OpenAI:
    http = loopback.client()
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=HANGS_S, http_client=http)


def prompt(server: Running) -> str:
    return server.tokenizer.decode(server.engine.submitted[-1].prompt, skip_special_tokens=False)


def response(name: str, num_chars: int = 0) -> dict[str, Any]:
    return {"id": name, "output": [], "filling": "x" * num_chars}


@pytest.mark.parametrize("stream", [False, True])
def test_response_stored_continues_with_the_whole_conversation(launch: Callable[..., Running], stream: bool) -> None:
    server = launch(responses_store_bytes=1 << 20)
    with connect(server) as api:

        def ask(what: str, **fields: Any) -> Any:
            options = {"model": "tiny", "input": what, "max_output_tokens": 6, **fields}
            if not stream:
                return api.responses.create(**options)
            return list(api.responses.create(**options, stream=True))[-1].response

        first = ask("How is it?", instructions="Be brief.")
        assert first.store is True
        assert api.responses.retrieve(first.id).to_dict() == first.to_dict()
        second = ask("And now?", previous_response_id=first.id)
        assert second.previous_response_id == first.id
        third = ask("And then?", previous_response_id=second.id, store=False)
    spelled = prompt(server)
    places = [spelled.index(said) for said in ("How is it?", first.output_text, "And now?", "And then?")]
    assert places == sorted(places)
    assert "Be brief." not in spelled  # instructions are of one response
    with connect(server) as api, pytest.raises(openai.NotFoundError):
        api.responses.retrieve(third.id)


def test_response_of_another_key_is_not_found(launch: Callable[..., Running]) -> None:
    """C29: to read, to continue and to delete, the answer is that of a response that never was."""
    server = launch(responses_store_bytes=1 << 20, api_keys=("one", "two"))
    with connect(server, "one") as mine, connect(server, "two") as theirs:
        kept = mine.responses.create(model="tiny", input="secret", max_output_tokens=4)
        for call in (
            lambda name: theirs.responses.retrieve(name),
            lambda name: theirs.responses.delete(name),
            lambda name: theirs.responses.create(model="tiny", input="x", previous_response_id=name),
            lambda name: theirs.responses.input_tokens.count(model="tiny", input="x", previous_response_id=name),
        ):
            told = []
            for name in (kept.id, "resp_never"):
                with pytest.raises(openai.NotFoundError) as refused:
                    call(name)
                told.append(refused.value.message.replace(name, "NAME"))
            assert told[0] == told[1]
        assert mine.responses.retrieve(kept.id).id == kept.id
        mine.responses.delete(kept.id)
        with pytest.raises(openai.NotFoundError):
            mine.responses.retrieve(kept.id)


def test_response_id_of_another_keys_response_replaces_nothing() -> None:
    """C29: ids come from `x-request-id`, which clients choose."""
    store = ResponseStore(1000)
    store.put(ONE, response("same"), [{"own": 1}])
    store.put(OTHER, response("same"), [{"own": 2}])
    assert b'"own":1' in store.get(ONE, "same").items
    store.delete(OTHER, "same")
    assert store.get(ONE, "same")


def test_store_full_drops_the_least_recently_used_of_that_key_only() -> None:
    store = ResponseStore(1000)
    store.put(OTHER, response("theirs", 800), [])
    for name in ("a", "b", "c"):
        store.put(ONE, response(name, 250), [])
    store.get(ONE, "a")
    store.put(ONE, response("d", 250), [])
    assert store.get(OTHER, "theirs")
    assert [store.get(ONE, name).response[7:8] for name in ("a", "c", "d")] == [b"a", b"c", b"d"]
    with pytest.raises(NotFound):
        store.get(ONE, "b")
    store.put(ONE, response("large", 2000), [])
    for name in ("a", "c", "d", "large"):
        with pytest.raises(NotFound):
            store.get(ONE, name)


def test_store_same_id_again_counts_its_bytes_once() -> None:
    store = ResponseStore(1000)
    for _ in range(50):
        store.put(ONE, response("a", 300), [])
    store.put(ONE, response("b", 300), [])
    assert store.get(ONE, "a")


@pytest.mark.parametrize("mode", [None, DisaggregationMode.DECODE])
def test_store_off_refuses_by_name(launch: Callable[..., Running], mode: DisaggregationMode | None) -> None:
    server = launch() if mode is None else launch(responses_store_bytes=1 << 20, model=replace_mode(mode))
    with server.client() as http:
        for body, param in (({"store": True}, "store"), ({"previous_response_id": "x"}, "previous_response_id")):
            refused = http.post("/v1/responses", json={"input": "x", **body})
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "responses_not_stored")
            assert refused.json()["error"]["param"] == param
        for call in (http.get, http.delete):
            assert call("/v1/responses/resp_1").json()["error"]["code"] == "responses_not_stored"


def replace_mode(mode: DisaggregationMode) -> Any:
    return replace(MODEL, mode=mode)


def test_response_that_fails_is_not_stored(launch: Callable[..., Running]) -> None:
    server = launch(lambda: FakeEngine(interval_s=0.02), responses_store_bytes=1 << 20)
    with server.client() as http:
        with http.stream("POST", "/v1/responses", json={"input": "x", "stream": True}) as answer:
            lines = answer.iter_lines()
            begun = next(line for line in lines if line.startswith("data: "))
            server.call(server.engine.fail_all, "engine_dead", "the engine died")  # the server stays to be asked
            assert "response.failed" in "".join(lines)
        name = begun.partition('"id":"')[2].partition('"')[0]
        assert http.get(f"/v1/responses/{name}").status_code == 404


def test_input_items_of_a_stored_response_come_page_by_page(launch: Callable[..., Running]) -> None:
    server = launch(responses_store_bytes=1 << 20, api_keys=("one", "two"))
    with connect(server, "one") as api, connect(server, "two") as other:
        said = [{"role": "user", "content": f"Text {number}."} for number in range(5)]
        kept = api.responses.create(model="tiny", input=said, max_output_tokens=4)
        following = api.responses.create(
            model="tiny", input="And now?", previous_response_id=kept.id, max_output_tokens=4
        )
        listed = [
            [item.content for item in api.responses.input_items.list(kept.id, order=order, limit=2)]
            for order in ("asc", "desc")
        ]
        texts = [message["content"] for message in said]
        assert listed == [texts, texts[::-1]]
        kinds = [item.role for item in api.responses.input_items.list(following.id, order="asc")]
        assert kinds == ["user"] * 5 + ["assistant", "user"]
        with pytest.raises(openai.NotFoundError):
            other.responses.input_items.list(kept.id)
        for wrong in ({"limit": 0}, {"limit": 101}, {"after": "x"}):
            with pytest.raises(openai.BadRequestError):
                api.responses.input_items.list(kept.id, **wrong)


def until(api: openai.OpenAI, name: str, status: str) -> Any:
    """Poll a response until it has a status, as its client does."""
    while True:
        found = api.responses.retrieve(name)
        if found.status == status:
            return found
        assert found.status == "in_progress"


def test_background_response_goes_on_without_its_client(launch: Callable[..., Running]) -> None:
    server = launch(responses_store_bytes=1 << 20)
    server.call(setattr, server.engine, "hold", True)
    with connect(server) as api:
        begun = api.responses.create(model="tiny", input="How is it?", background=True, max_output_tokens=4)
        assert (begun.status, begun.background, begun.output) == ("in_progress", True, [])
        server.until(lambda: len(server.engine.running) == 1)
        assert api.responses.retrieve(begun.id).to_dict() == begun.to_dict()
        with pytest.raises(openai.BadRequestError, match="is being made"):
            api.responses.create(model="tiny", input="And now?", previous_response_id=begun.id)
    server.call(setattr, server.engine, "hold", False)
    with connect(server) as api:
        done = until(api, begun.id, "incomplete")
        assert (done.id, done.usage.output_tokens) == (begun.id, 4)
        following = api.responses.create(
            model="tiny", input="And now?", previous_response_id=begun.id, max_output_tokens=4
        )
        assert following.previous_response_id == begun.id
    spelled = prompt(server)
    assert spelled.index("How is it?") < spelled.index(done.output_text) < spelled.index("And now?")
    assert server.call(lambda: server.engine.running) == {}


def test_background_response_is_cancelled_by_its_key_alone(launch: Callable[..., Running]) -> None:
    server = launch(responses_store_bytes=1 << 20, api_keys=("one", "two"))
    server.call(setattr, server.engine, "hold", True)
    with connect(server, "one") as api, connect(server, "two") as other:
        begun = api.responses.create(model="tiny", input="x", background=True)
        server.until(lambda: len(server.engine.running) == 1)
        with pytest.raises(openai.NotFoundError):
            other.responses.cancel(begun.id)
        assert api.responses.cancel(begun.id).status == "cancelled"
        assert server.call(lambda: len(server.engine.running)) == 0
        assert api.responses.cancel(begun.id).status == "cancelled", "a second time"
        again = api.responses.create(model="tiny", input="x", background=True)
        server.until(lambda: len(server.engine.running) == 1)
        api.responses.delete(again.id)
        server.until(lambda: not server.engine.running)
        with pytest.raises(openai.NotFoundError):
            api.responses.retrieve(again.id)
        server.call(setattr, server.engine, "hold", False)
        whole = api.responses.create(model="tiny", input="x", max_output_tokens=2)
        with pytest.raises(openai.BadRequestError, match="not made in the background"):
            api.responses.cancel(whole.id)


def test_background_response_that_fails_says_so_and_one_too_many_is_refused(launch: Callable[..., Running]) -> None:
    server = launch(lambda: FakeEngine(max_running=1, max_queued=0), responses_store_bytes=1 << 20)
    server.call(setattr, server.engine, "hold", True)
    with connect(server) as api:
        begun = api.responses.create(model="tiny", input="x", background=True)
        server.until(lambda: len(server.engine.running) == 1)
        with pytest.raises(openai.RateLimitError):
            api.responses.create(model="tiny", input="x", background=True)
        server.call(server.engine.fail_all, "engine_dead", "the engine died")  # the server stays to be asked
        failed = until(api, begun.id, "failed")
    assert failed.error is not None
    assert failed.error.code == "engine_dead"
