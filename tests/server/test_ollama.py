"""/api/chat, /api/generate and the routes beside them as Ollama's clients know them.

The bodies are those that the official Python client (ollama 0.6.3) and LiteLLM (1.106) send.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from forebay.server.api.ollama.request import (
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from tests.server.conftest import Running
from tests.server.fake_engine import FakeEngine
from tests.server.scripted_server import ScriptedServer
from tests.server.test_refusals import assert_said
from tests.text.answers.templates import QWEN3_THINKING, QWEN25

COUNTS = ("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration")
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "required": ["city"],
            "properties": {"city": {"type": "string", "description": "the city"}},
        },
    },
}
ASK = {"role": "user", "content": "How is it?"}


class Speaker(ScriptedServer):
    def say(self, answer: str, path: str = "/api/chat", **body: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The whole answer, and the lines of the streamed one."""
        self.answer = answer
        whole = post(self.server, path, {"model": "tiny", **body, "stream": False}).json()
        streamed = post(self.server, path, {"model": "tiny", **body})
        assert streamed.headers["content-type"] == "application/x-ndjson"
        assert streamed.text.endswith("}\n")
        lines = [json.loads(line) for line in streamed.text.splitlines()]
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
        assert whole["done"]
        texts = {"message", "response", "thinking", "logprobs"}
        ending = {name: value for name, value in without_times(whole).items() if name not in texts}
        assert without_times(lines[-1]).items() >= ending.items()
        return whole, lines


def post(server: Running, path: str, body: dict[str, Any]) -> httpx.Response:
    with server.client() as client:
        answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer


def without_times(told: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in told.items() if "duration" not in name and name != "created_at"}


@pytest.fixture(scope="module")
def plain(patience: None) -> Iterator[Speaker]:
    speaker = Speaker(QWEN25)
    yield speaker
    speaker.server.close()


@pytest.fixture(scope="module")
def thinking(patience: None) -> Iterator[Speaker]:
    speaker = Speaker(QWEN3_THINKING)
    yield speaker
    speaker.server.close()


def test_chat_is_answered_whole_and_in_lines(plain: Speaker) -> None:
    options = {"num_predict": 90, "temperature": 0.0, "seed": 3, "stop": ["STOP"], "num_ctx": 4096}
    whole, lines = plain.say("hello world STOP", messages=[ASK], tools=[], options=options, keep_alive="5m")
    assert whole["message"] == {"role": "assistant", "content": "hello world "}
    assert "".join(line["message"]["content"] for line in lines) == "hello world "
    assert (whole["model"], whole["done_reason"], whole["load_duration"]) == ("tiny", "stop", 0)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", whole["created_at"])
    params = plain.server.engine.submitted[-1].params
    assert (params.max_tokens, params.temperature, params.seed) == (90, 0.0, 3)


def test_chat_durations_are_measured_nanoseconds(plain: Speaker) -> None:
    for told in plain.say("hello world", messages=[ASK])[1][-1], plain.say("hello world", messages=[ASK])[0]:
        assert all(type(told[name]) is int for name in COUNTS)
        assert told["eval_count"] == len(plain.server.tokenizer.encode("hello world")) + 1  # and the end token
        assert told["prompt_eval_count"] == len(plain.server.engine.submitted[-1].prompt)
        assert told["total_duration"] >= told["prompt_eval_duration"] + told["eval_duration"]
        assert told["prompt_eval_duration"] > 0


def test_chat_ends_with_length_if_the_answer_is_cut_off(plain: Speaker) -> None:
    whole, _ = plain.say("hello world and more", messages=[ASK], options={"num_predict": 2})
    assert (whole["done_reason"], whole["eval_count"]) == ("length", 2)
    unlimited, _ = plain.say("hello", messages=[ASK], options={"num_predict": -2})
    assert unlimited["done_reason"] == "stop"


def test_chat_tool_is_called_and_its_result_comes_back_without_ids(plain: Speaker) -> None:
    called = [{"function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}]
    whole, lines = plain.say(f"Let me look.\n{CALL}\n{CALL}", messages=[ASK], tools=[TOOL])
    assert whole["message"] == {"role": "assistant", "content": "Let me look.\n", "tool_calls": called * 2}
    assert whole["done_reason"] == "stop"
    assert [call for line in lines for call in line["message"].get("tool_calls", [])] == called * 2
    results = [{"role": "tool", "tool_name": "get_weather", "content": f"result {i}"} for i in range(2)]
    messages = [ASK, {**whole["message"], "thinking": None, "images": None}, *results]
    last, _ = plain.say("It is sunny.", messages=messages, tools=[TOOL])
    assert last["message"]["content"] == "It is sunny."
    asked = OllamaChatRequest.parse({"model": "tiny", "messages": messages}).chat
    assert asked is not None
    ids = [call.id for call in asked.messages[1].tool_calls or ()]
    assert [message.tool_call_id for message in asked.messages[2:]] == ids
    assert len(set(ids)) == 2
    assert plain.prompt().index("result 0") < plain.prompt().index("result 1")


def test_chat_result_belongs_to_the_oldest_open_call_of_its_tool() -> None:
    calls = [{"id": None, "function": {"name": name, "arguments": {}}} for name in ("a", "b", "a")]
    said = {"role": "assistant", "tool_calls": calls}
    names: tuple[dict[str, str], ...] = ({"tool_name": "b"}, {"tool_name": "a"}, {}, {})
    results = [{"role": "tool", "content": str(number), **name} for number, name in enumerate(names)]
    asked = OllamaChatRequest.parse({"model": "m", "messages": [ASK, said, *results]}).chat
    assert asked is not None
    assert [(message.content, message.tool_call_id) for message in asked.messages[2:]] == [
        ("1", "call_1_0"),  # in the order of the calls
        ("0", "call_1_1"),
        ("2", "call_1_2"),
        ("3", "call_unknown"),
    ]


def test_chat_call_that_is_cut_off_is_an_object(plain: Speaker) -> None:
    cut = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "day": "Mo'
    whole, lines = plain.say(cut, messages=[ASK], tools=[TOOL])
    (called,) = whole["message"]["tool_calls"]
    assert called == {"function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}
    assert [call for line in lines for call in line["message"].get("tool_calls", [])] == [called]


def test_chat_thinking_stands_apart(thinking: Speaker) -> None:
    whole, lines = thinking.say("<think>\nwell\n</think>\n\nhello", messages=[ASK], think=True)
    assert whole["message"] == {"role": "assistant", "content": "hello", "thinking": "well"}
    assert "".join(line["message"].get("thinking", "") for line in lines) == "well"
    assert "".join(line["message"]["content"] for line in lines) == "hello"
    thinking.say("<think>\nwell\n</think>\n\nhello", messages=[ASK, whole["message"], ASK])


def test_chat_logprobs_stand_beside_the_message(plain: Speaker) -> None:
    whole, lines = plain.say("hello world", messages=[ASK], logprobs=True, top_logprobs=2)
    assert "".join(token["token"] for token in whole["logprobs"]) == "hello world"
    assert [len(token["top_logprobs"]) for token in whole["logprobs"]] == [2] * len(whole["logprobs"])
    assert [token for line in lines for token in line.get("logprobs", [])] == whole["logprobs"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("form", ["json", {"type": "object", "properties": {}}])
def test_chat_format_constrains_the_answer(plain: Speaker, form: Any) -> None:
    plain.say("{}", messages=[ASK], format=form)
    assert plain.server.engine.submitted[-1].params.grammar is not None
    plain.say("{}", messages=[ASK], format="")
    assert plain.server.engine.submitted[-1].params.grammar is None


def test_chat_names_what_changes_nothing(plain: Speaker) -> None:
    body = {"model": "tiny:latest", "messages": [ASK], "keep_alive": 300, "options": {"num_ctx": 1, "num_gpu": 99}}
    answer = post(plain.server, "/api/chat", body)
    assert answer.headers["x-forebay-ignored"] == "keep_alive, num_ctx, num_gpu"
    assert json.loads(answer.text.splitlines()[0])["model"] == "tiny:latest"


def test_chat_history_with_unknown_fields_is_served_and_they_are_named(plain: Speaker) -> None:
    call = {"function": {"name": "f", "arguments": {}, "index": "first", "strict": True}, "parsed": {"a": 1}}
    said = {"role": "assistant", "tool_calls": [call], "done_reason": "stop", "audio": None}
    messages = [{**ASK, "metadata": {"turn": 1}}, said, {"role": "tool", "tool_name": "f", "content": "sun"}]
    answer = post(plain.server, "/api/chat", {"model": "tiny", "messages": messages})
    ignored = {*answer.headers["x-forebay-ignored"].split(", ")}
    assert ignored == {"metadata", "done_reason", "parsed", "index", "strict"}


def test_chat_with_an_unknown_field_outside_the_history_is_refused(plain: Speaker) -> None:
    with plain.server.client() as client:
        answer = client.post("/api/chat", json={"model": "tiny", "messages": [ASK], "metadata": {}})
    assert answer.status_code == 400
    assert "metadata" in answer.json()["error"]


def test_generate_goes_through_the_template_unless_raw(plain: Speaker) -> None:
    whole, lines = plain.say("hello", "/api/generate", prompt="Say it.", system="Be brief.", context=[], template="")
    assert (whole["response"], whole["done_reason"]) == ("hello", "stop")
    assert "".join(line["response"] for line in lines) == "hello"
    assert "Be brief.<|im_end|>\n<|im_start|>user\nSay it." in plain.prompt()
    whole, lines = plain.say("hello", "/api/generate", prompt="Say <|im_end|>", raw=True, options={"num_predict": 9})
    assert whole["response"] == "".join(line["response"] for line in lines) == "hello"
    assert plain.prompt() == "Say <|im_end|>"
    assert plain.server.engine.submitted[-1].prompt[-1] == 2  # the control token, as Ollama reads it
    plain.say("hello", "/api/generate", prompt="x", raw=True, logprobs=True)


def test_generate_thinking_stands_apart(thinking: Speaker) -> None:
    whole, lines = thinking.say("<think>\nwell\n</think>\n\nhello", "/api/generate", prompt="x")
    assert (whole["response"], whole["thinking"]) == ("hello", "well")
    assert "".join(line.get("thinking", "") for line in lines) == "well"


@pytest.mark.parametrize(("path", "held"), [("/api/chat", {"message": {"role": "assistant", "content": ""}}),
                                            ("/api/generate", {"response": ""})])  # fmt: skip
def test_request_without_a_prompt_loads_and_computes_nothing(plain: Speaker, path: str, held: dict[str, Any]) -> None:
    before = len(plain.server.engine.submitted)
    told = post(plain.server, path, {"model": "tiny", "keep_alive": 0}).json()
    assert told.items() >= {**held, "done": True, "done_reason": "load"}.items()
    assert len(plain.server.engine.submitted) == before


def test_embed_returns_a_vector_for_each_text(plain: Speaker) -> None:
    body = {"model": "tiny", "input": ["a", "b"], "truncate": True, "options": {"num_ctx": 5}, "keep_alive": "5m"}
    answer = post(plain.server, "/api/embed", body)
    found = answer.json()
    assert [len(vector) for vector in found["embeddings"]] == [8, 8]
    assert (found["model"], found["load_duration"], found["prompt_eval_count"]) == ("tiny", 0, 2)
    assert found["total_duration"] > 0
    assert answer.headers["x-forebay-ignored"] == "options, keep_alive"
    openai = post(plain.server, "/v1/embeddings", {"input": ["a", "b"]}).json()
    assert [each["embedding"] for each in openai["data"]] == found["embeddings"]
    short = post(plain.server, "/api/embed", {"model": "tiny", "input": "a", "dimensions": 4}).json()
    assert [len(vector) for vector in short["embeddings"]] == [4]


def test_model_is_listed_and_shown(plain: Speaker, thinking: Speaker) -> None:
    with plain.server.client() as client:
        (card,) = client.get("/api/tags").json()["models"]
        assert client.get("/api/version").json()["version"]
    assert (card["name"], card["model"], card["details"]["format"]) == ("tiny", "tiny", "safetensors")
    shown = post(plain.server, "/api/show", {"model": "tiny:latest", "verbose": False}).json()
    assert shown["capabilities"] == ["completion", "tools"]
    assert "<|im_start|>" in shown["template"]
    assert "temperature 1.0\n" in shown["parameters"]
    assert "thinking" in post(thinking.server, "/api/show", {"model": "tiny"}).json()["capabilities"]


HI = {"model": "tiny", "messages": [ASK]}


@pytest.mark.parametrize(
    ("kind", "body", "code", "param", "words"),
    [
        (OllamaChatRequest, {"messages": [ASK]}, "missing_field", "model", "missing"),
        (OllamaChatRequest, {"model": "m", "messages": [{**ASK, "images": ["aGk="]}]}, "unsupported_field",
         "messages.0.images", "takes no images"),
        (OllamaGenerateRequest, {"model": "m", "prompt": "x", "images": ["aGk="]}, "unsupported_field", "images",
         "takes no images"),
        (OllamaShowRequest, {}, "missing_field", "model", "/api/tags"),
        (OllamaChatRequest, {**HI, "options": {"top_p": 2}}, "invalid_value", "options.top_p", "at most 1"),
        (OllamaChatRequest, {**HI, "options": {"stop": ["é" * 200]}}, "invalid_value", "options.stop", "bytes"),
        (OllamaChatRequest, {**HI, "format": "xml"}, "invalid_value", "format", ""),
        (OllamaChatRequest, {**HI, "think": "much"}, "invalid_value", "think", ""),
        (OllamaChatRequest, {**HI, "top_logprobs": 2}, "invalid_combination", "top_logprobs", "logprobs=true"),
        (OllamaChatRequest, {**HI, "tools": [TOOL, TOOL]}, "invalid_value", "tools", "two tools"),
        (OllamaGenerateRequest, {"model": "m", "prompt": "x", "context": [1]}, "unsupported_field", "context", ""),
        (OllamaGenerateRequest, {"model": "m", "prompt": "x", "raw": True, "system": "y"}, "invalid_combination",
         "system", "no template"),
        (OllamaEmbedRequest, {"model": "m", "input": [5]}, "invalid_value", "input.0", "string"),
    ],
)  # fmt: skip
def test_refusal_names_the_clients_own_field(
    kind: Any, body: dict[str, Any], code: str, param: str, words: str
) -> None:
    assert_said(kind, body, code, param, words)


def test_errors_have_ollamas_shape_before_and_within_a_stream(launch: Callable[..., Running]) -> None:
    server = launch(api_keys=("a-key-0123456789",))
    with server.client() as client:
        assert client.get("/api/tags").json().keys() == {"error"}
    with server.client(headers={"authorization": "Bearer a-key-0123456789"}) as client:
        absent = client.post("/api/chat", json={"model": "other", "messages": [ASK]})
        think = client.post("/api/chat", json={"model": "tiny", "messages": [ASK], "think": True})
        nowhere = client.post("/api/pull", json={"model": "other"})
    assert [absent.status_code, think.status_code, nowhere.status_code] == [404, 400, 404]
    assert absent.json() == {"error": "the model 'other' is not served here; tiny is"}
    assert "leave think out" in think.json()["error"]
    assert nowhere.json().keys() == {"error"}


def test_failure_is_the_last_line_of_a_stream(launch: Callable[..., Running]) -> None:
    server = launch(lambda: FakeEngine(interval_s=0.01))
    lines = []
    with server.client() as client, client.stream("POST", "/api/chat", json=HI) as answer:
        for line in answer.iter_lines():
            lines.append(json.loads(line))
            if len(lines) == 1:
                server.call(server.engine.die, "it was told to")
    assert lines[0]["done"] is False
    assert lines[-1].keys() == {"error"}


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain", ""])
def test_body_of_any_media_type_is_read_on_ollamas_and_llama_servers_routes(plain: Speaker, kind: str | None) -> None:
    """LiteLLM names none, `curl -d` a form's; a page of another site that does is refused by its origin."""
    plain.answer = "hello"
    headers = {} if kind is None else {"content-type": kind}
    bodies = {
        "/api/chat": {**HI, "stream": False},
        "/api/generate": {"model": "tiny", "prompt": "x", "stream": False},
        "/api/show": {"model": "tiny"},
        "/completion": {"prompt": "x", "n_predict": 2},
        "/apply-template": {"messages": [ASK]},
    }
    with plain.server.client() as client:
        for path, body in bodies.items():
            request = client.build_request("POST", path, content=json.dumps(body), headers=headers)
            assert request.headers.get("content-type") == kind
            assert client.send(request).status_code == 200, path
            for foreign in ({"origin": "https://evil.test"}, {"sec-fetch-site": "cross-site"}):
                page = client.build_request("POST", path, content=json.dumps(body), headers={**headers, **foreign})
                assert client.send(page).status_code == 403, path
        openai = client.build_request("POST", "/v1/chat/completions", content=json.dumps(HI), headers=headers)
        assert client.send(openai).status_code == 415


def test_options_of_the_documentation_are_taken_and_those_without_effect_named(plain: Speaker) -> None:
    """The request of Ollama's documentation with all options, and those of its older versions."""
    plain.answer = "hello"
    documented = {
        "num_keep": 5,
        "seed": 42,
        "num_predict": 100,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.0,
        "typical_p": 0.7,
        "repeat_last_n": 33,
        "temperature": 0.8,
        "repeat_penalty": 1.2,
        "presence_penalty": 1.5,
        "frequency_penalty": 1.0,
        "penalize_newline": True,
        "stop": ["\n", "user:"],
        "numa": False,
        "num_ctx": 1024,
        "num_batch": 2,
        "num_gpu": 1,
        "main_gpu": 0,
        "use_mmap": True,
        "num_thread": 8,
        "mirostat": 1,
        "mirostat_eta": 0.6,
        "mirostat_tau": 0.8,
        "tfs_z": 1.5,
    }
    body = {"model": "tiny", "prompt": "x", "stream": False, "options": documented}
    ignored = post(plain.server, "/api/generate", body).headers["x-forebay-ignored"]
    params = plain.server.engine.submitted[-1].params
    assert (params.seed, params.max_tokens, params.top_k, params.repetition_penalty) == (42, 100, 20, 1.2)
    named = {"typical_p", "repeat_last_n", "penalize_newline", "mirostat", "tfs_z", "num_ctx"}
    assert named <= set(ignored.split(", "))
    for unlimited in (-2, -1, 0):
        post(plain.server, "/api/generate", {**body, "options": {"num_predict": unlimited}})
        assert plain.server.engine.submitted[-1].params.max_tokens > 200


def test_models_in_memory_are_listed_and_pulled(plain: Speaker) -> None:
    with plain.server.client() as client:
        (tag,) = client.get("/api/tags").json()["models"]
        (running,) = client.get("/api/ps").json()["models"]
        other = client.post("/api/pull", json={"name": "other"})
    assert running.items() > tag.items()
    assert running["size_vram"] == 0
    assert running["expires_at"] > running["modified_at"]
    assert (other.status_code, "forebay models pull" in other.json()["error"]) == (404, True)
    for name in ("model", "name"):
        assert post(plain.server, "/api/show", {name: "tiny"}).json()["details"] == tag["details"]
        assert post(plain.server, "/api/pull", {name: "tiny:latest", "stream": False}).json() == {"status": "success"}
    lines = post(plain.server, "/api/pull", {"model": "tiny", "insecure": False}).text.splitlines()
    assert [json.loads(line) for line in lines][-1] == {"status": "success"}


def test_embeddings_of_the_older_route_are_one_vector(plain: Speaker) -> None:
    body = {"model": "tiny", "prompt": "a", "options": {"num_ctx": 5}, "keep_alive": "5m"}
    old = post(plain.server, "/api/embeddings", body).json()
    new = post(plain.server, "/api/embed", {"model": "tiny", "input": "a"}).json()
    assert old == {"embedding": new["embeddings"][0]}
