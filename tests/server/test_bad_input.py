"""Scorecard D-1, D-3, D-5, E-1: no body makes the server fail, stall or forget to answer."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import cycle
from typing import Any

import httpx
import pytest

from forebay.base.errors import InvalidRequest
from forebay.http.bodies import parse_json_object
from forebay.http.errors import MESSAGES, OLLAMA, RESPONSES
from forebay.requests.sampling_params import SamplingParams
from forebay.server.admin.aborting import AbortRequest
from forebay.server.admin.tree import TreeRequest
from forebay.server.api.anthropic.messages_request import CountTokensRequest, MessagesRequest
from forebay.server.api.llama.request import LlamaCompletionRequest
from forebay.server.api.ollama.request import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaPullRequest,
    OllamaShowRequest,
)
from forebay.server.api.openai.embeddings_request import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    TeiEmbedRequest,
    TeiPredictRequest,
    TeiSparseRequest,
)
from forebay.server.api.openai.responses_request import CompactRequest, InputTokensRequest, ResponsesRequest
from forebay.server.api.sglang.generate import NativeRequest
from forebay.server.app import ROUTES
from forebay.server.protocol.administration import (
    CheckTransfersRequest,
    LoadAdapterRequest,
    PauseRequest,
    ReleaseRequest,
    ResumeRequest,
    UnloadAdapterRequest,
    UpdateWeightsRequest,
)
from forebay.server.protocol.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from forebay.server.protocol.strict import Strict, body_types
from tests.deadlines import HANGS_S
from tests.server.conftest import CONFIG, Running
from tests.server.fake_engine import count_up
from tests.server.process_status import MIB, forget_peak, peak_rss_bytes, rss_bytes
from tests.together import together

BODIES = {route.path: route.body for route in ROUTES if route.body is not None}
VALID: dict[type[Strict], dict[str, Any]] = {
    ChatRequest: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1},
    CompletionRequest: {"prompt": "hello", "max_tokens": 1},
    CountTokensRequest: {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]},
    MessagesRequest: {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1},
    NativeRequest: {"text": "hello", "sampling_params": {"max_new_tokens": 1}},
    LlamaCompletionRequest: {"prompt": "hello", "n_predict": 1},
    OllamaChatRequest: {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "stream": False,
        "options": {"num_predict": 1},
    },
    OllamaGenerateRequest: {"model": "tiny", "prompt": "hello", "stream": False, "options": {"num_predict": 1}},
    OllamaEmbedRequest: {"model": "tiny", "input": "hello"},
    OllamaEmbeddingsRequest: {"model": "tiny", "prompt": "hello"},
    OllamaShowRequest: {"model": "tiny"},
    OllamaPullRequest: {"model": "tiny", "stream": False},
    ResponsesRequest: {"input": "hello", "max_output_tokens": 1},
    CompactRequest: {"input": "hello"},
    InputTokensRequest: {"input": "hello"},
    TokenizeRequest: {"prompt": "hello"},
    TreeRequest: {},
    EmbeddingRequest: {"input": "hello"},
    AbortRequest: {"rid": "nobody"},
    ScoreRequest: {"text_1": "hello", "text_2": "world"},
    RerankRequest: {"query": "hello", "documents": ["world"]},
    ClassifyRequest: {"input": "hello"},
    PoolingRequest: {"input": "hello"},
    TeiEmbedRequest: {"inputs": "hello"},
    TeiSparseRequest: {"inputs": "hello"},
    TeiPredictRequest: {"inputs": "hello"},
    DetokenizeRequest: {"tokens": [5]},
    PauseRequest: {},
    ReleaseRequest: {"tags": ["weights"]},
    ResumeRequest: {},
    UpdateWeightsRequest: {"model_path": "other"},
    LoadAdapterRequest: {"lora_name": "new", "lora_path": "new"},
    UnloadAdapterRequest: {"lora_name": "new"},
    CheckTransfersRequest: {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998},
}
# What numeric values are wrong for everybody, as JSON text.
NEVER_NUMBERS = [
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    '"nan"',
    "true",
    '"3"',
    "9223372036854775808",
    "1" + "0" * 400,
]
NEVER_IDS = ["-1", "49152", "49153", "2147483648", "9223372036854775808", "true", "1.5", '"x"']
MAX_IDS = 4096 * CONFIG.max_prompts  # as `read_body` has it, of a model with this context
OUR_TYPES = sorted({kind.__name__ for kind in body_types()})
OUR_WORDS = [*OUR_TYPES, "constrained", "list[", "[key]", "Value error", "Input should", "function-", "<"]
WRONG = ["[]", "{}", '""', '"x"', "[[]]", "[null]", "-1", "1.5", "true", '{"a": 1}', '[1, "a"]', "99999999999"]


def kinds(schema: Any) -> set[str]:
    if isinstance(schema, list):
        return set().union(*map(kinds, schema)) if schema else set()
    if not isinstance(schema, dict):
        return set()
    own = {schema["type"]} if isinstance(schema.get("type"), str) else set()
    return own | kinds(schema.get("anyOf", []))


@cache
def properties(body: type[Strict]) -> dict[str, Any]:
    described: dict[str, Any] = body.model_json_schema()["properties"]
    return described


def numeric_fields(body: type[Strict]) -> list[str]:
    return [name for name, schema in properties(body).items() if kinds(schema) & {"number", "integer"}]


def post(server: Running, path: str, content: bytes | str, **headers: str) -> httpx.Response:
    with server.client() as http:
        return http.post(path, content=content, headers={"content-type": "application/json", **headers})


def assert_refused(answer: httpx.Response, *allowed: int) -> None:
    assert answer.status_code in (allowed or (400,)), answer.text
    whole = answer.json()
    error = whole["error"]
    if answer.request.url.path.startswith(OLLAMA):
        assert set(whole) == {"error"}
        error = {"message": error}
    elif answer.request.url.path.startswith(MESSAGES):
        assert (set(whole), whole["type"], set(error)) == (
            {"type", "error"},
            "error",
            {"message", "type", "details"},
        )
    else:
        assert (set(whole), set(error)) == ({"error"}, {"message", "type", "param", "code"})
    assert_says(error["message"], error.get("param"))
    assert_says(answer.text, None, ours=())


def assert_says(message: str, param: str | None, ours: Sequence[str] = OUR_WORDS) -> None:
    """It says something, and nothing of ours or of the libraries'."""
    assert message
    said = f"{message} {param}"
    assert not any(word in said for word in ("Traceback", "site-packages", ".py", "pydantic", *ours)), said


def refusal(body: type[Strict], content: bytes | str) -> InvalidRequest | None:
    """Return how a body is refused before its route sees it; None if it is not."""
    try:
        body.parse(parse_json_object(content.encode() if isinstance(content, str) else content, MAX_IDS))
    except InvalidRequest as error:
        assert_says(error.message, error.param)
        return error
    return None


def assert_named(answer: httpx.Response, field: str) -> None:
    """In the client's own shape: as the parameter where there is one, or in the message."""
    error = answer.json()["error"]
    if isinstance(error, str):
        assert field in error, error
    elif "param" in error:
        assert str(error["param"]).split(".")[0] == field, error
    else:
        assert field in error["message"], error


def with_raw(base: dict[str, Any], field: str, raw: str) -> str:
    rest = {key: value for key, value in base.items() if key != field}
    return json.dumps(rest)[:-1] + (", " if rest else "") + f'"{field}": {raw}}}'


def test_every_number_has_both_bounds() -> None:
    for body in VALID:
        for name in numeric_fields(body):
            options = properties(body)[name]
            numbers = [
                option for option in [options, *options.get("anyOf", [])] if kinds(option) & {"number", "integer"}
            ]
            bounded = [o for o in numbers if "anyOf" not in o]
            assert bounded
            for option in bounded:
                assert {"minimum", "exclusiveMinimum"} & set(option), (body, name)
                assert {"maximum", "exclusiveMaximum"} & set(option), (body, name)


@together("body", VALID)
def test_no_numeric_field_takes_what_is_no_number_in_range(body: type[Strict]) -> None:
    for field in numeric_fields(body):
        integer = "number" not in kinds(properties(body)[field])
        for raw in [*NEVER_NUMBERS, *(["3.5", "-0.0"] if integer else [])]:
            error = refusal(body, with_raw(VALID[body], field, raw))
            assert error is not None, (field, raw)
            # What is no JSON to begin with names no field.
            if "not a JSON object as expected" not in error.message:
                assert str(error.param).split(".")[0] == field, error


@together("path, body", BODIES.items())
def test_wrong_number_is_named_in_the_routes_own_shape(shared: Running, path: str, body: type[Strict]) -> None:
    for field in numeric_fields(body)[:1]:
        answer = post(shared, path, with_raw(VALID[body], field, '"3"'))
        assert_refused(answer)
        assert_named(answer, field)


@pytest.mark.parametrize("raw", NEVER_IDS)
def test_no_field_takes_an_id_outside_the_vocabulary(shared: Running, raw: str) -> None:
    cases = [
        ("/v1/completions", "prompt", f"[{raw}]"),
        ("/v1/completions", "prompt", f"[[5, {raw}]]"),
        ("/v1/completions", "stop_token_ids", f"[{raw}]"),
        ("/v1/completions", "allowed_token_ids", f"[{raw}]"),
        ("/v1/completions", "logit_bias", json.dumps({raw.strip('"'): 1})),
        ("/v1/chat/completions", "stop_token_ids", f"[{raw}]"),
        ("/v1/chat/completions", "logit_bias", json.dumps({raw.strip('"'): 1})),
        ("/detokenize", "tokens", f"[{raw}]"),
        ("/generate", "input_ids", f"[{raw}]"),
    ]
    for path, field, value in cases:
        if raw == '"x"' and value == '["x"]' and field == "prompt":
            continue  # a list of one text is a prompt
        valid = {key: value for key, value in VALID[BODIES[path]].items() if field != "input_ids" or key != "text"}
        assert_refused(post(shared, path, with_raw(valid, field, value)))


def test_the_id_carrying_fields_are_all_tried_above() -> None:
    carrying = {
        name for body in VALID for name in body.model_fields if "ids" in name or name in ("logit_bias", "tokens")
    }
    carrying.remove("return_token_ids")  # a switch
    assert carrying == {"stop_token_ids", "allowed_token_ids", "logit_bias", "tokens", "input_ids"}


@pytest.mark.parametrize(("most", "every"), [(1, 4), pytest.param(len(WRONG), 1, marks=pytest.mark.slow)])
@together("path, body", BODIES.items())
def test_every_field_refuses_what_it_is_not(
    shared: Running, path: str, body: type[Strict], most: int, every: int
) -> None:
    """Each field x each wrong value: an answer of ours, never a 5xx. The server is asked what the parser lets pass, of
    every fourth field or of each at most so many values."""
    with shared.client(headers={"content-type": "application/json"}) as http:
        for field in sorted(body.model_fields)[::every]:
            contents = [with_raw(VALID[body], field, raw) for raw in WRONG]
            for content in [content for content in contents if not refusal(body, content)][:most]:
                answer = http.post(path, content=content)
                assert answer.status_code in (200, 400, 404), (content, answer.text)
                if answer.status_code != 200:
                    assert_refused(answer, 400, 404)
        assert_live(shared, http)


def assert_live(server: Running, http: httpx.Client | None = None) -> None:
    """It is healthy, and a control request gets the tokens that this prompt and seed have."""
    if http is None:
        with server.client() as own:
            return assert_live(server, own)
    assert http.get("/health").status_code == 200
    ask = {"prompt": [5, 6, 7], "max_tokens": 3, "seed": 11}
    answer = http.post("/v1/completions", json=ask).json()
    want = count_up([5, 6, 7], SamplingParams(max_new_tokens=3, seed=11))
    spelled = [server.tokenizer.decode([token], skip_special_tokens=False) for token in want]
    assert answer["choices"][0]["text"] == "".join(spelled)
    return None


def corpus() -> Iterator[tuple[str, bytes]]:
    yield "empty", b""
    yield "null", b"null"
    yield "list", b"[1]"
    yield "cut", b'{"prompt": "a'
    yield "trailing", b'{"prompt": "a"} x'
    yield "not utf-8", b'{"prompt": "\xff\xfe"}'
    yield "utf-16", '{"prompt": "a"}'.encode("utf-16")
    yield "bom", b"\xef\xbb\xbf" + b'{"prompt": "a"}'
    yield "twice", b'{"prompt": "a", "prompt": "b"}'
    yield "deep", b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    yield "deep unclosed", b'{"prompt": ' + b"[" * 1_000_000
    yield "many lists", b'{"prompt": [' + b"[1]," * 50_000 + b"[1]]}"
    yield "surrogate", b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\udfff"}]}'
    yield "surrogate key", b'{"\\ud800": 1}'
    yield "unknown", b'{"prompt": "a", "nonsense": 1}'
    yield "digits", b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}"


@pytest.mark.parametrize(("name", "content"), list(corpus()), ids=[name for name, _ in corpus()])
def test_bodies_that_are_not_what_they_should_be(name: str, content: bytes) -> None:
    assert [body for body in VALID if not refusal(body, content)] == []


@together("path, content", zip(BODIES, cycle(content for _, content in corpus()), strict=False))
def test_bodies_that_are_not_what_they_should_be_get_an_answer(shared: Running, path: str, content: bytes) -> None:
    assert_refused(post(shared, path, content), 400, 413)
    assert_live(shared)


def test_wrong_media_types_are_refused(shared: Running) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        with shared.client() as http:
            answer = http.post("/v1/completions", content=b"{}", headers={"content-type": kind})
        assert_refused(answer, 415)
    assert_refused(post(shared, "/v1/completions", b"x", **{"content-encoding": "br"}), 415)


def test_openai_fields_pass_only_when_they_ask_for_nothing(shared: Running) -> None:
    harmless = {"user": "me", "store": None, "tools": [], "response_format": {"type": "text"}}
    harmless |= {"metadata": {"run": "7"}}
    base = VALID[ChatRequest]
    assert post(shared, "/v1/chat/completions", json.dumps({**base, **harmless})).status_code == 200
    for name, harmless_values in ChatRequest.ignored.items():
        answer = post(shared, "/v1/chat/completions", json.dumps({**base, name: {"type": 1}}))
        assert_refused(answer)
        error = answer.json()["error"]
        assert name in error["message"]
        assert error["param"] == name
        assert error["code"] == ("invalid_value" if harmless_values.wanted else "unsupported_field")
    assert_refused(post(shared, "/v1/chat/completions", json.dumps({**base, "chat_template": "x"})))


def test_ignored_fields_are_named_in_a_header_of_every_answer(shared: Running) -> None:
    for stream in (True, False):
        body = {**VALID[ChatRequest], "cache_prompt": True, "keep_alive": "5m", "stream": stream}
        answer = post(shared, "/v1/chat/completions", json.dumps(body))
        assert (answer.status_code, answer.headers["x-forebay-ignored"]) == (200, "cache_prompt, keep_alive")
    answer = post(shared, "/v1/chat/completions", json.dumps(VALID[ChatRequest]))
    assert "x-forebay-ignored" not in answer.headers


def test_paths_may_be_spelled_as_clients_spell_them(shared: Running) -> None:
    for path in ("/chat/completions", "/v1/chat/completions/", "/chat/completions/"):
        assert post(shared, path, json.dumps(VALID[ChatRequest])).status_code == 200
    with shared.client() as http:
        for path in ("/models", "/v1/models/", "/livez", "/readyz", "/ping", "/health/"):
            assert http.get(path).status_code == 200, path
        for path in ("/version", "/v1", "/v1/v1/models"):
            assert http.get(path).status_code == 404, path


USER, TOOL = {"role": "user", "content": "x"}, {"name": "f", "input_schema": {}}
OVER_CAP_ELSEWHERE = [
    (MESSAGES, "stop_sequences", ["x"] * 17),
    (MESSAGES, "stop_sequences", ["é" * 200]),
    (MESSAGES, "tools", [TOOL] * 1025),
    (MESSAGES, "messages", [USER] * 4097),
    (MESSAGES, "messages", [{"role": "user", "content": "a" * 10**6}]),
    (f"{MESSAGES}/count_tokens", "messages", [{"role": "user", "content": "^" * 10**6}]),
    (RESPONSES, "input", "a" * 10**6),
    (RESPONSES, "input", [USER] * 4097),
    (RESPONSES, "tools", [{"type": "web_search"}] * 1025),
    (RESPONSES, "max_output_tokens", 10**6),
    (RESPONSES, "metadata", {str(i): "x" for i in range(17)}),
]
OVER_CAP = [
    ("n", 9),
    ("best_of", 9),
    ("max_tokens", 10**6),
    ("logprobs", 21),
    ("stop", ["x"] * 17),
    ("stop", "x" * 257),
    ("stop", ["é" * 200]),
    ("stop_token_ids", [5] * 257),
    ("logit_bias", {str(i): 1 for i in range(1025)}),
    ("prompt", ["x"] * 17),
    ("prompt", [[]]),
    ("prompt", []),
    ("prompt", ""),
    ("prompt", "a" * 10**6),
    ("prompt", "^" * 10**6),
    ("prompt", [5] * 9000),
    ("cache_salt", "x" * 129),
]


CAPS = [*(("/v1/completions", *cap) for cap in OVER_CAP), *OVER_CAP_ELSEWHERE]


@pytest.mark.parametrize(("path", "field", "value"), CAPS, ids=[f"{field}-{i}" for i, (_, field, _) in enumerate(CAPS)])
def test_values_over_their_caps_are_refused_before_a_long_text_is_looked_at(
    shared: Running, path: str, field: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenized: list[str] = []
    encode = shared.tokenizer._encode

    def watched(text: str, *args: Any, **options: Any) -> Any:
        tokenized.append(text)
        return encode(text, *args, **options)

    monkeypatch.setattr(shared.tokenizer, "_encode", watched)
    answer = post(shared, path, json.dumps({**VALID[BODIES[path]], field: value}))
    assert_refused(answer)
    assert_named(answer, field)
    assert sum(map(len, tokenized)) <= 100
    assert_live(shared)


@pytest.mark.parametrize("announced", [True, False])
def test_bodies_over_the_limit_are_refused_while_they_arrive(shared: Running, announced: bool) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    size, block = 64 * MIB, b"x" * (MIB // 4)
    if announced:
        head += b"content-length: %d\r\n\r\n" % size
    else:
        head += b"transfer-encoding: chunked\r\n\r\n"
        block = b"%x\r\n%s\r\n" % (len(block), block)
    assert_live(shared)
    rss = rss_bytes()
    forget_peak()
    with shared.connect() as sock:
        sender = threading.Thread(target=_send_all, args=(sock, head, *[block] * 32))
        sender.start()
        answer = b""
        # An eighth of the body is on its way, and no more comes before this.
        while b"}}" not in answer and (part := sock.recv(4096)):
            answer += part
        sender.join(HANGS_S)
        _send_all(sock, *[block] * (4 * size // MIB - 32))
    assert answer.startswith(b"HTTP/1.1 413")
    assert b'"payload_too_large"' in answer
    # A growing buffer may be copied once near its end, and the client's own blocks are in this process too.
    assert peak_rss_bytes() - rss <= 2 * CONFIG.max_body_bytes + 2 * MIB
    assert_live(shared)


@pytest.mark.parametrize("path", [b"/health", MESSAGES.encode() + b"?beta=true"])
@pytest.mark.parametrize("headers", [b"x: " + b"a" * (1 << 20), b"\r\n".join(b"x%d: 1" % i for i in range(10_000))])
def test_headers_over_the_limit_are_431(shared: Running, headers: bytes, path: bytes) -> None:
    with shared.connect() as sock:
        sender = threading.Thread(
            target=_send_all, args=(sock, b"POST " + path + b" HTTP/1.1\r\nhost: localhost\r\n" + headers)
        )
        sender.start()
        answer = sock.recv(4096)
        sender.join(HANGS_S)
    assert answer.startswith(b"HTTP/1.1 431")
    assert (b'"type":"error"' if path.startswith(MESSAGES.encode()) else b'"headers_too_large"') in answer


def _send_all(sock: socket.socket, *blocks: bytes) -> None:
    try:
        for block in blocks:
            sock.sendall(block)
    except OSError:
        return  # it stopped reading, as it should


def test_garbage_is_not_http(shared: Running) -> None:
    with shared.connect() as sock:
        sock.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 400")


def test_unknown_routes_and_methods_have_the_error_shape(shared: Running) -> None:
    with shared.client() as http:
        assert_refused(http.get("/nowhere"), 404)
        assert_refused(http.get("/v1/completions"), 405)
        assert_refused(http.request("TRACE", "/health"), 405)
        assert http.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
        assert http.get("/health", headers={"x-request-id": "no spaces"}).headers["x-request-id"] != "no spaces"
