"""C33: a router forwards a client's bytes, so that every body has the status and the error of a single server."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.generation import GenerationMode

from forebay.http.route import Access
from forebay.route.app import ROUTES
from tests.fuzz.mutants import mutated, seeds
from tests.fuzz.test_json_body import BODIES as JSON_BODIES
from tests.route.twins import Twins, as_json, twins
from tests.server import test_bad_input as bad

# Of a router alone: whose request an id is, only servers know, and what each of several servers said is a list.
OTHERWISE = {"/abort_request", *(route.path for route in ROUTES if route.access in (Access.ADMIN, Access.CLUSTER))}
POSTS = [route.path for route in ROUTES if route.method == "POST" and route.path not in OTHERWISE]
READ = [path for path in POSTS if path in bad.BODIES]
PARTS = 144  # of all bodies; the suite tries one part, the long tier all


@pytest.fixture(scope="module")
def both(patience: None) -> Iterator[Twins]:
    with twins() as made:
        yield made


C, CHAT = "/v1/completions", "/v1/chat/completions"
BIG = b"1" + b"0" * 400
REPORTED = [
    *(
        (C, b'{"prompt":"x","max_tokens":2,"temperature":%s}' % value)
        for value in (b"1e999", b"-1e999", b"NaN", b"1e-999")
    ),
    *(
        (C, b'{"prompt":"x","max_tokens":2,"seed":%s}' % value)
        for value in (BIG, b"9223372036854775808", b"18446744073709551616")
    ),
    *((C, b'{"prompt":"x","max_tokens":2,"n":%s}' % value) for value in (BIG, b"1.0", b"99")),
    (C, b'{"prompt":"x","max_tokens":1e999}'),
    (C, b'{"prompt":"\\ud800","max_tokens":2}'),
    (C, b'{"prompt":"x","max_tokens":2,"max_tokens":3}'),
    (C, b'{"prompt":"x","max_tokens":2,"logit_bias":{"5":1e999}}'),
    (C, b'{"prompt":"x","max_tokens":2,"logit_bias":{"5":1,"05":2}}'),
    (C, b'{"prompt":"x","max_tokens":2,"metadata":{"a":1e999}}'),
    (C, b'{"prompt":"x","max_tokens":2,"zzz":1}'),
    (C, b'{"prompt":"x","max_tokens":0}'),
    (C, b'{"prompt":"x","max_tokens":2,"seed":1, "bootstrap_room": 5}'),
    (C, b'{"prompt":"x","max_tokens":2,"seed":1, "bootstrap_host": "169.254.169.254"}'),
    (CHAT, b'{"messages":[{"role":"user","content":"x"}],"max_tokens":2,"tool_choice":"required"}'),
    (CHAT, b'{"messages":[],"max_tokens":2}'),
    ("/tokenize", b'{"prompt":"a","x":1e999}'),
    ("/v1/embeddings", b'{"input":1e999}'),
    ("/v1/messages", b'{"max_tokens":2,"messages":[{"role":"user","content":"\\ud800"}],"model":"tiny"}'),
    ("/v1/responses", b'{"input":"x","max_output_tokens":2,"temperature":1e999}'),
    ("/generate", b'{"text":"x","sampling_params":{"max_new_tokens":2,"temperature":1e999}}'),
]


@pytest.mark.parametrize(("path", "content"), REPORTED)
def test_router_reported_body_has_the_answer_of_a_server(both: Twins, path: str, content: bytes) -> None:
    both.assert_same("POST", path, content)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("name", "content"), list(bad.corpus()), ids=[name for name, _ in bad.corpus()])
def test_router_body_that_is_no_object_has_the_answer_of_a_server(both: Twins, name: str, content: bytes) -> None:
    for path in READ:
        assert both.assert_same("POST", path, content).status in (400, 413)


def wrong_fields() -> Iterator[tuple[str, bytes]]:
    """Each field of each route with each wrong value, as `test_bad_input` tries them on a server."""
    for path in READ:
        body = bad.BODIES[path]
        numbers = set(bad.numeric_fields(body))
        for field in body.model_fields:
            for value in (*bad.WRONG, *(bad.NEVER_NUMBERS if field in numbers else ())):
                yield path, bad.with_raw(bad.VALID[body], field, value).encode()
    for path, field, value in bad.CAPS:
        if path in READ:
            yield path, as_json({**bad.VALID[bad.BODIES[path]], field: value})


@pytest.mark.long
@pytest.mark.parametrize("part", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, PARTS))])
def test_router_field_with_a_wrong_value_has_the_answer_of_a_server(both: Twins, part: int) -> None:
    for path, content in [*wrong_fields()][part::PARTS]:
        both.assert_same("POST", path, content)


@pytest.mark.parametrize("seed", seeds(1, 20))
def test_router_mutant_of_a_body_has_the_answer_of_a_server(both: Twins, seed: int) -> None:
    rng = random.Random(seed)
    valid = [as_json(bad.VALID[bad.BODIES[path]]) for path in READ]
    for _ in range(60):
        both.assert_same("POST", rng.choice(READ), mutated(rng, [*valid, *JSON_BODIES]))


@pytest.mark.slow  # every time: wrong values and mutants of bodies, above
@pytest.mark.parametrize("mode", list(GenerationMode), ids=str)
@pytest.mark.parametrize("seed", range(8))
def test_router_request_of_the_described_api_has_the_answer_of_a_server(
    both: Twins, seed: int, mode: GenerationMode
) -> None:
    document = both.alone.get("/openapi.json").json()
    known = {route.path for route in ROUTES} - OTHERWISE - {"/metrics", "/server_info", "/debug/state", "/health"}
    document["paths"] = {
        path: item for path, item in document["paths"].items() if path.replace("id}", "id:path}") in known
    }
    for result in schemathesis.openapi.from_dict(document).get_all_operations():
        operation = result.ok()
        if mode is GenerationMode.POSITIVE or operation.body:
            _try(both, operation, mode, seed)


def _try(both: Twins, operation: Any, mode: GenerationMode, seed: int) -> None:
    checks = [*HealthCheck]

    @settings(max_examples=20 if seed else 2, deadline=None, database=None, suppress_health_check=checks)
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        alone, routed = (case.call(base_url=str(client.base_url)) for client in (both.alone, both.routed))
        assert routed.status_code == alone.status_code, case.as_curl_command()
        if alone.status_code != 200:
            assert routed.json() == alone.json()

    run._hypothesis_internal_use_seed = seed  # what @seed does
    run()


# -- HTTP --------------------------------------------------------------------------------------------------------------

BODY = b'{"prompt":"x","max_tokens":2,"seed":1}'


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": ""},
        {"content-type": "text/plain"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-encoding": "gzip"},
        {"content-encoding": "identity"},
        {"x-forebay-bootstrap-room": "5"},
        {"x-forebay-cluster-proof": "0" * 64},
        {"accept": "text/html", "x-request-id": "mine"},
    ],
    ids=lambda headers: ", ".join(f"{name}={value[:20]}" for name, value in headers.items()),
)
def test_router_headers_have_the_answer_of_a_server(both: Twins, path: str, headers: dict[str, str]) -> None:
    content = as_json(bad.VALID[bad.BODIES[path]]) if path in bad.BODIES else b"{}"
    both.assert_same("POST", path, content, **headers)


@pytest.mark.parametrize("content", [b"", b"{}", b"x", b'{"a":' * 5000], ids=["empty", "object", "junk", "deep"])
def test_router_flushes_whatever_the_body_is(both: Twins, content: bytes) -> None:
    """A second reader of the body waited for ever."""
    alone, routed = both.ask("POST", "/flush_cache", content)
    assert (alone.status, routed.status) == (200, 200)
    assert routed.body == ["members", "success"]


@pytest.mark.quick(2)
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE"])
def test_router_methods_have_the_answer_of_a_server(both: Twins, method: str) -> None:
    for path in (
        *POSTS,
        "/v1/models",
        "/v1/models/tiny",
        "/v1/models/none",
        "/health",
        "/nowhere",
        "/v1/models/a/",
        "//",
    ):
        both.assert_same(method, path)
        both.assert_same(method, f"{path}?a=b")


def head(path: bytes, *lines: bytes) -> bytes:
    first = b"POST " + path + b" HTTP/1.1"
    return b"\r\n".join(
        [first, b"Host: localhost", b"Content-Type: application/json", b"Connection: close", *lines, b"", b""]
    )


CHUNKED = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (BODY[:7], BODY[7:8], BODY[8:])) + b"0\r\n\r\n"
LENGTH = b"Content-Length: %d" % len(BODY)


@pytest.mark.parametrize(
    "request_",
    [
        head(C.encode(), b"Transfer-Encoding: chunked") + CHUNKED,
        head(C.encode(), LENGTH, b"Content-Type: application/json") + BODY,
        head(C.encode(), LENGTH, LENGTH) + BODY,
        head(C.encode(), LENGTH, b"Transfer-Encoding: chunked") + CHUNKED,
        head(C.encode(), LENGTH, b"Content-Encoding: identity", b"Content-Encoding: gzip") + BODY,
        head(C.encode(), LENGTH, b"X-Request-Id: a\rX-Evil: 1") + BODY,
        head(C.encode(), LENGTH, b"X-Api-Key: \xe9\xff") + BODY,
        head(C.encode(), LENGTH, b"Host: other") + BODY,
        head(C.encode(), b"Content-Length: 5000000") + b"x",
        head(C.encode(), b"Content-Length: 0"),
        head(b"/v1//completions", LENGTH) + BODY,
        head(b"/v1/completions%20", LENGTH) + BODY,
        head(b"/chat/completions/", LENGTH) + BODY,
    ],
    ids=range(13),
)
def test_router_bytes_of_a_request_have_the_answer_of_a_server(both: Twins, request_: bytes) -> None:
    both.assert_same_bytes(request_)


def test_router_relays_lines_as_a_server_streams_them(both: Twins) -> None:
    """Ollama's streams are lines of JSON, and no events."""
    said = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "options": {"num_predict": 4}}
    told = [client.post("/api/chat", json=said) for client in (both.alone, both.routed)]
    assert [answer.headers["content-type"] for answer in told] == [told[0].headers["content-type"]] * 2
    assert "content-length" not in told[1].headers
    lines = [[list(json.loads(line)) for line in answer.text.splitlines()] for answer in told]
    assert lines[0] == lines[1]
    assert len(lines[0]) > 1


def test_router_and_server_stream_the_same_events(both: Twins) -> None:
    for path, body in ((C, {"prompt": "x"}), (CHAT, {"messages": [{"role": "user", "content": "x"}]})):
        asked = {**body, "max_tokens": 5, "seed": 1}
        answer = both.assert_same("POST", path, as_json({**asked, "stream": True}))
        assert answer.headers["content-type"].startswith("text/event-stream")
        alone, routed = (client.post(path, json=asked).json() for client in (both.alone, both.routed))
        assert alone["choices"] == routed["choices"]


def test_router_large_bodies_have_the_answer_of_a_server(both: Twins) -> None:
    """Beside the event loop where they are read for their prompts' beginnings."""
    fits, over = b" " * (4 << 20), b" " * ((4 << 20) + 1)
    for content in (as_json({"prompt": "a" * 3_000_000, "max_tokens": 2}), fits, over, BODY + b" " * 4_000_000):
        both.assert_same("POST", C, content)


def test_router_compressed_bodies_have_the_answer_of_a_server(both: Twins) -> None:
    """Members decode what the client sent; the router reads it for the beginning of its prompt."""
    told = [
        both.assert_same("POST", C, content, **{"content-encoding": "gzip"}).status
        for content in (
            gzip.compress(BODY),
            gzip.compress(bytes(8 << 20)),
            gzip.compress(BODY)[:-1],
            gzip.compress(b"[]"),
        )
    ]
    assert told == [200, 413, 400, 400]


def test_router_keys_have_the_answer_of_a_server() -> None:
    """Each request's own key reaches the members, which ask for it as a server does."""
    keys = {"api_keys": ("sk-user-0123456789",), "admin_api_keys": ("sk-admin-0123456789",)}
    with twins(**keys) as both:
        for name, value in (("authorization", "Bearer {}"), ("x-api-key", "{}"), ("authorization", "Basic {}")):
            for key in (*keys["api_keys"], *keys["admin_api_keys"], "sk-other-0123456789", ""):
                said = {name: value.format(key).strip()}
                both.assert_same("POST", C, BODY, **said)
                alone, routed = both.ask("POST", "/flush_cache", b"{}", **said)
                assert routed.status == alone.status
                both.assert_same("GET", "/v1/models", **said)
