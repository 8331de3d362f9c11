"""Conversations that the model sums up: sealed for one API key, and expanded in later requests."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from forebay.base.errors import InvalidRequest, RequestError
from forebay.http.errors import HttpError
from forebay.http.security import ANYBODY, Tenant
from forebay.server.api.openai import seals
from forebay.server.api.openai.compaction import MAX_RETAINED_CHARS, retained
from forebay.server.api.openai.responses_items import SUMMARY_BEFORE, SUMMARY_PROMPT, MessageItem
from forebay.server.api.openai.seals import LIFETIME_S, MAX_BYTES, PREFIX, Seals
from tests.server.conftest import Running
from tests.server.fake_engine import FakeEngine
from tests.server.scripted_server import ScriptedServer
from tests.server.test_responses import connect
from tests.server.test_tools import CALL
from tests.text.answers.templates import QWEN3

TOOLS: Any = [{"type": "function", "name": "get_weather", "parameters": {"type": "object", "properties": {}}}]
ITEMS: list[Any] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "Fix the tests."},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Let me look."}], "summary": []},
    {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "It rains."},
    {"role": "assistant", "content": "Two tests fail."},
    {"role": "user", "content": "Go on."},
]
TRIGGER = {"type": "compaction_trigger"}
ONE, OTHER = Tenant("one"), Tenant("other")


@pytest.fixture(scope="module", autouse=True)
def cryptography() -> None:
    pytest.importorskip("cryptography", reason="nothing is sealed without it: pip install 'forebay[compaction]'")


@pytest.fixture(scope="module")
def model(patience: None) -> Iterator[ScriptedServer]:
    scripted = ScriptedServer(QWEN3)
    yield scripted
    scripted.server.close()


def compacted(model: ScriptedServer, stream: bool = False, **fields: Any) -> Any:
    """Return the response to a trigger behind `ITEMS`, as Codex asks for it."""
    model.answer = "<think>\nhm\n</think>\n\nIt rained, two tests fail."
    with connect(model.server) as api:
        options = {"model": "tiny", "input": [*ITEMS, TRIGGER], "tools": TOOLS, **fields}
        if not stream:
            return api.responses.create(**options)
        *events, last = api.responses.create(**options, stream=True)
    assert [event.sequence_number for event in (*events, last)] == list(range(len(events) + 1))
    kinds = [event.type for event in events]
    assert kinds == [
        "response.created",
        "response.in_progress",
        *(f"response.output_item.{w}" for w in ("added", "done")),
    ]
    assert events[-1].item == last.response.output[0]
    assert last.type == "response.completed"
    return last.response


@pytest.mark.quick(1)
@pytest.mark.parametrize("stream", [False, True])
def test_trigger_is_answered_with_one_sealed_item_of_the_summary(model: ScriptedServer, stream: bool) -> None:
    response = compacted(model, stream)
    (item,) = response.output
    assert (response.status, item.type) == ("completed", "compaction")
    assert item.encrypted_content.startswith(PREFIX)
    assert b"rained" not in base64.urlsafe_b64decode(item.encrypted_content.removeprefix(PREFIX))
    prompt = model.prompt()
    assert SUMMARY_PROMPT in prompt
    assert "get_weather" in prompt.partition("Fix the tests.")[0], "tools stay: the prompt goes on from the cached one"
    assert response.usage.input_tokens == len(model.server.engine.submitted[-1].prompt)


def test_item_is_expanded_to_its_summary_and_replaces_what_the_model_said(model: ScriptedServer) -> None:
    (item,) = compacted(model).output
    model.answer = "Fixed."
    with connect(model.server) as api:
        rest = [{"role": "user", "content": "And now?"}]
        api.responses.create(model="tiny", input=[*ITEMS, item.to_dict(), *rest], tools=TOOLS)
    prompt = model.prompt()
    told = ["Be brief.", "Fix the tests.", "Go on.", SUMMARY_BEFORE, "It rained, two tests fail.", "And now?"]
    assert sorted(told, key=prompt.index) == told
    assert not any(gone in prompt for gone in ("It rains.", "Let me look.", "Two tests fail.", "hm\n"))


def test_compact_returns_the_input_of_the_next_request(model: ScriptedServer) -> None:
    model.answer = "It rained, two tests fail."
    with connect(model.server) as api:
        answer = api.responses.compact(model="tiny", input=ITEMS, instructions="Help.")
        assert answer.object == "response.compaction"
        assert [item.type for item in answer.output] == ["message", "message", "compaction"]
        assert answer.usage.output_tokens > 0
        assert "Help." in model.prompt()
    with model.server.client() as http:
        output = http.post("/v1/responses/compact", json={"input": ITEMS}).json()["output"]
        model.answer = "Fixed."
        http.post("/v1/responses", json={"input": [*output, {"role": "user", "content": "And now?"}]})
    prompt = model.prompt()
    told = ["Fix the tests.", "Go on.", "It rained, two tests fail.", "And now?"]
    assert sorted(told, key=prompt.index) == told


def test_item_of_a_summary_can_be_compacted_again(model: ScriptedServer) -> None:
    (item,) = compacted(model).output
    model.answer = "Shorter still."
    with connect(model.server) as api:
        again = api.responses.create(model="tiny", input=[item.to_dict(), TRIGGER])
    assert "It rained, two tests fail." in model.prompt()
    assert again.output[0].type == "compaction"


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_beyond_the_threshold_is_compacted_before_the_answer(model: ScriptedServer, stream: bool) -> None:
    model.answer = "It rained."
    asked = {"input": ITEMS, "tools": TOOLS, "stream": stream}
    with model.server.client() as http:
        before = len(model.server.engine.submitted)
        managed = {"context_management": [{"type": "compaction", "compact_threshold": 100_000}]}
        within = http.post("/v1/responses", json={**asked, **managed, "stream": False}).json()
        assert [item["type"] for item in within["output"]] == ["message"]
        assert len(model.server.engine.submitted) == before + 1
        managed = {"context_management": [{"type": "compaction", "compact_threshold": 50}]}
        answer = http.post("/v1/responses", json={**asked, **managed})
    assert len(model.server.engine.submitted) == before + 3
    if stream:
        events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        told = [msgspec.json.decode(event) for event in events]
        assert [event["sequence_number"] for event in told] == list(range(len(told)))
        indexes = [event["output_index"] for event in told if event["type"] == "response.output_item.added"]
        assert indexes == [0, 1]
        response = told[-1]["response"]
        assert told[0]["response"]["output"] == []
    else:
        response = answer.json()
    assert [item["type"] for item in response["output"]] == ["compaction", "message"]
    prompt = model.prompt()
    assert SUMMARY_BEFORE in prompt
    assert "It rains." not in prompt
    following = [*ITEMS, *response["output"], {"role": "user", "content": "And now?"}]
    with model.server.client() as http:
        assert http.post("/v1/responses", json={"input": following}).status_code == 200
    assert "It rains." not in model.prompt()


def test_summary_that_is_empty_or_a_call_is_a_typed_error(model: ScriptedServer) -> None:
    for said in ("<think>\nhm\n</think>\n\n", CALL):
        model.answer = said
        with model.server.client() as http:
            asked = {"input": [*ITEMS, TRIGGER], "tools": TOOLS}
            answer = http.post("/v1/responses", json=asked)
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "compaction_failed")
            events = http.post("/v1/responses", json={**asked, "stream": True}).text
            assert "event: response.failed" in events
            assert "compaction_failed" in events


WRONG: dict[str, tuple[Any, str]] = {
    "not sealed": ([{"type": "compaction", "encrypted_content": "x"}], "seal_invalid"),
    "of OpenAI": ([{"type": "compaction", "encrypted_content": "gAAAAABp" + "x" * 200}], "seal_invalid"),
    "no base64": ([{"type": "compaction", "encrypted_content": PREFIX + "ä"}], "seal_invalid"),
    "too short": ([{"type": "compaction", "encrypted_content": PREFIX + "AAAA"}], "seal_invalid"),
    "without content": ([{"type": "compaction"}], "missing_field"),
    "trigger in front": ([TRIGGER, {"role": "user", "content": "x"}], "invalid_combination"),
}


@pytest.mark.parametrize(("items", "code"), WRONG.values(), ids=WRONG)
def test_items_that_this_server_did_not_make_are_typed_400(model: ScriptedServer, items: Any, code: str) -> None:
    with model.server.client() as http:
        answer = http.post("/v1/responses", json={"input": [*items, {"role": "user", "content": "y"}]})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"].partition(".")[0]) == (400, code, "input")


def test_item_of_another_key_is_a_typed_400(launch: Callable[..., Running]) -> None:
    """C29: it neither opens nor says whose it is."""
    server = launch(lambda: FakeEngine(lambda *_: [3 + byte for byte in b"summary"]), api_keys=("one", "two"))

    def ask(key: str, **body: Any) -> Any:
        with server.client() as http:
            return http.post("/v1/responses", json=body, headers={"authorization": f"Bearer {key}"})

    (item,) = ask("one", input=[{"role": "user", "content": "x"}, TRIGGER]).json()["output"]
    assert ask("one", input=[item, {"role": "user", "content": "y"}]).status_code == 200
    refused = ask("two", input=[item, {"role": "user", "content": "y"}])
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "seal_invalid")
    forged = ask("two", input=[{**item, "encrypted_content": item["encrypted_content"][:-4] + "AAAA"}, TRIGGER])
    assert forged.json()["error"]["message"] == refused.json()["error"]["message"]


def test_stored_compaction_is_continued(launch: Callable[..., Running]) -> None:
    said = [3 + byte for byte in b"a summary"]
    server = launch(lambda: FakeEngine(lambda *_: [*said, 2]), responses_store_bytes=1 << 20)
    with connect(server) as api:
        first = api.responses.create(model="tiny", input=[*ITEMS[:2], TRIGGER])
        assert api.responses.retrieve(first.id).output[0].type == "compaction"
        api.responses.create(model="tiny", input="And now?", previous_response_id=first.id)
    prompt = server.tokenizer.decode(server.engine.submitted[-1].prompt, skip_special_tokens=False)
    assert prompt.index("a summary") < prompt.index("And now?")
    assert SUMMARY_PROMPT not in prompt


def test_seal_opens_for_its_owner_until_it_expires_and_for_no_change() -> None:
    made = Seals(b"secret")
    sealed = made.seal(ONE, b"content", 1000.0)
    assert made.opened(ONE, sealed, 1000.0 + LIFETIME_S - 1) == b"content"
    assert Seals(b"secret").opened(ONE, sealed, 1000.0) == b"content", "servers with one cluster key share seals"
    assert made.seal(ONE, b"content", 1000.0) != sealed
    with pytest.raises(InvalidRequest, match="older than the 168 hours") as caught:
        made.opened(ONE, sealed, 1000.0 + LIFETIME_S)
    assert caught.value.code == "seal_expired"
    others = [(made, OTHER), (made, ANYBODY), (Seals(b"other"), ONE), (Seals(), ONE)]
    changed = [sealed.replace(PREFIX, "forebay.2:"), sealed[:-1], sealed + "A", sealed.swapcase(), "", PREFIX]
    raw = bytearray(base64.urlsafe_b64decode(sealed.removeprefix(PREFIX)))
    for place in range(0, len(raw), 5):
        flipped = bytearray(raw)
        flipped[place] ^= 1
        changed.append(PREFIX + base64.urlsafe_b64encode(flipped).decode())
    for opener, owner, text in [(*each, sealed) for each in others] + [(made, ONE, text) for text in changed]:
        with pytest.raises(InvalidRequest) as caught:
            opener.opened(owner, text, 1000.0)
        assert caught.value.code == "seal_invalid"


def test_seal_is_bounded() -> None:
    made = Seals()
    assert made.opened(ONE, made.seal(ONE, bytes(MAX_BYTES), 0.0), 0.0) == bytes(MAX_BYTES)
    with pytest.raises(RequestError, match=f"{MAX_BYTES + 1} bytes"):
        made.seal(ONE, bytes(MAX_BYTES + 1), 0.0)


def test_messages_of_the_user_that_stay_are_bounded_from_the_end() -> None:
    items = [MessageItem(role="user", content=str(number) * 100_000) for number in range(5)]
    kept = retained([*items, MessageItem(role="assistant", content="no")])
    texts = [item["content"][0]["text"] for item in kept]
    assert [text[0] for text in texts] == ["3", "4"]
    assert sum(map(len, texts)) <= MAX_RETAINED_CHARS


def test_without_the_package_compaction_is_refused_with_what_to_install(
    model: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> Any:
        raise HttpError(501, "pip install 'forebay[compaction]'", code="compaction_unavailable")

    monkeypatch.setattr(seals, "_aead", missing)
    before = len(model.server.engine.submitted)
    with model.server.client() as http:
        for path, body in (
            ("/v1/responses", {"input": [*ITEMS, TRIGGER]}),
            ("/v1/responses/compact", {"input": ITEMS}),
        ):
            answer = http.post(path, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (501, "compaction_unavailable")
        assert http.post("/v1/responses", json={"input": ITEMS}).status_code == 200
    assert len(model.server.engine.submitted) == before + 1, "nothing was computed for it"
