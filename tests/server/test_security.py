"""Scorecard J-1, J-4: nobody gets in without a key, nor through a name that is not ours."""

from __future__ import annotations

import http.client
import re
from collections.abc import Callable
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.routing import Route

from forebay.base.errors import ConfigError
from forebay.http.listen import bind
from forebay.http.route import Access
from forebay.http.security import Security, host_name
from forebay.server.app import ROUTES
from forebay.server.console import HEADERS
from tests.deadlines import HANGS_S
from tests.server.conftest import CONFIG, Running
from tests.server.fake_engine import FakeEngine

KEY, ADMIN = "user-key-ü", "admin-key"


@pytest.fixture(scope="module")
def guarded(tokenizer) -> Running:  # type: ignore[misc]
    from tests.server.conftest import start

    server = start(tokenizer, FakeEngine, api_keys=(KEY,), admin_api_keys=(ADMIN,))
    yield server
    server.close()


def status(server: Running, method: str, path: str, *headers: tuple[str, bytes]) -> int:
    """Raw: nothing normalises the path or the headers."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=HANGS_S)
    connection.putrequest(method, path, skip_host=any(name == "host" for name, _ in headers), skip_accept_encoding=True)
    for name, value in headers:
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


def bearer(key: str, scheme: str = "Bearer") -> tuple[str, bytes]:
    return ("authorization", f"{scheme} {key}".encode())


REFUSED: list[tuple[tuple[str, bytes], ...]] = [
    (),
    (bearer("wrong"),),
    (bearer("schlüssel"),),
    (bearer(KEY, "bearer"),),
    (bearer(KEY), bearer(KEY)),
    (("authorization", KEY.encode()),),
    (("authorization", b"Bearer \xff\xfe"),),
    (bearer(KEY + " "),),
    (("x-api-key", b"wrong"),),
    (bearer(KEY), ("x-api-key", b"wrong")),
]
PATHS = [route.path.replace("{model_id:path}", "tiny") for route in ROUTES]
TRICKS = [
    "/openapi.json/x",
    "/Docs",
    "/docs/../v1/models",
    "/docs;/x",
    "//v1/models",
    "/v1/..;/models",
    "/health/",
    "/health%2f",
    "/x/health?",
    "/Health",
]
TRICKS += ["/health/../v1/models", "/%2e/v1/models", "/console/../v1/models", "/v1/models?path=/health", "/;/health"]


METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE")
EACH = [("GET", headers) for headers in REFUSED] + [(method, REFUSED[1]) for method in METHODS[1:]]
ALL = [(method, headers) for method in METHODS for headers in REFUSED]


@pytest.mark.whole
@pytest.mark.parametrize("asked", [pytest.param(EACH, id="each"), pytest.param(ALL, id="all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", sorted({*PATHS, *TRICKS} - {"/health", "/health/", "/health%2f"}))
def test_nothing_but_health_is_served_without_a_key(
    guarded: Running, path: str, asked: list[tuple[str, tuple[tuple[str, bytes], ...]]]
) -> None:
    for method, headers in asked:
        assert status(guarded, method, path, *headers) == 401, (method, headers)


@pytest.mark.parametrize("other", range(8))  # in a set that has no order of its own, the right one may come first
def test_two_keys_that_differ_are_none(guarded: Running, other: int) -> None:
    assert status(guarded, "GET", "/v1/models", bearer(KEY), ("x-api-key", b"wrong %d" % other)) == 401


def test_the_routes_tried_are_all_there_are(tokenizer) -> None:
    import asyncio

    from forebay.server.app import create_context, create_routes
    from tests.server.conftest import MODEL

    async def paths() -> set[str]:
        context = create_context(CONFIG, MODEL, FakeEngine(), tokenizer)
        return {route.path for route in create_routes(context, {}).routes if isinstance(route, Route)}

    assert asyncio.run(paths()) == {"/openapi.json", "/docs", *(route.path for route in ROUTES)}


def test_health_needs_no_key_but_only_by_get(guarded: Running) -> None:
    assert status(guarded, "GET", "/health") == 200
    assert status(guarded, "GET", "/health?x=1") == 200
    assert status(guarded, "POST", "/health") == 401


@pytest.mark.long
def test_the_reference_needs_no_key_and_what_it_links_to_neither(guarded: Running) -> None:
    with guarded.client() as client:
        page = client.get("/docs")
        assert (page.status_code, client.post("/docs").status_code) == (200, 401)
        assert (client.get("/openapi.json").status_code, client.post("/openapi.json").status_code) == (200, 401)
    assert "<script" not in page.text
    assert page.headers["content-security-policy"] == HEADERS["Content-Security-Policy"]
    loaded = re.findall(r'(?:src|href)="([^"#]*)', page.text)
    assert {link for link in loaded if link} == {
        "console/icon.svg",
        "console/base.css",
        "console/docs.css",
        "openapi.json",
    }
    assert 'id="chatrequest"' in page.text
    assert 'href="#chatrequest"' in page.text


def test_a_key_opens_the_api_and_only_the_admin_key_the_admin_routes(guarded: Running) -> None:
    own = ("x-api-key", KEY.encode())
    for headers in ((bearer(KEY),), (own,), (bearer(KEY), own)):
        assert status(guarded, "GET", "/v1/models", *headers) == 200
    assert status(guarded, "GET", "/v1/models", own, own) == 401
    assert status(guarded, "GET", "/metrics", bearer(ADMIN)) == 200
    assert status(guarded, "POST", "/flush_cache", bearer(ADMIN)) == 200
    assert status(guarded, "POST", "/save_cache", bearer(ADMIN)) == 200


def test_every_admin_route_refuses_a_users_key(guarded: Running) -> None:
    routes = [route for route in ROUTES if route.access is Access.ADMIN]
    refused = [route for route in routes if status(guarded, route.method, route.template, bearer(KEY)) == 403]
    assert refused == routes


def test_admin_routes_do_not_exist_without_an_admin_key(launch: Callable[..., Running]) -> None:
    server = launch(api_keys=(KEY,))
    assert status(server, "POST", "/flush_cache", bearer(KEY)) == 404


def test_without_keys_loopback_is_open(shared: Running) -> None:
    for path in ("/v1/models", "/metrics", "/server_info", "/debug/state"):
        assert status(shared, "GET", path) == 200
    assert status(shared, "POST", "/flush_cache") == 200


def test_an_admin_key_alone_guards_flushing_alone(launch: Callable[..., Running]) -> None:
    server = launch(admin_api_keys=(ADMIN,))
    assert status(server, "GET", "/debug/state") == 200
    assert status(server, "POST", "/flush_cache") == 401
    assert status(server, "POST", "/flush_cache", bearer(ADMIN)) == 200


def test_the_state_needs_a_users_key_and_holds_no_text(guarded: Running) -> None:
    headers = {"authorization": f"Bearer {KEY}".encode()}
    with guarded.client(headers=headers) as http:  # type: ignore[arg-type]
        http.post("/v1/completions", json={"prompt": "canary-prompt", "max_tokens": 2, "user": "canary-user"})
        state = http.get("/debug/state")
    assert state.status_code == 200
    assert "canary" not in state.text
    assert KEY not in state.text


@pytest.mark.parametrize(
    "host", [b"evil.example", b"127.0.0.1.evil.example", b"", b"localhost@evil.example", b"10.0.0.1"]
)
def test_names_that_are_not_ours_are_refused(shared: Running, host: bytes) -> None:
    assert status(shared, "GET", "/health", ("host", host)) in (400, 403)


@pytest.mark.parametrize(
    "host",
    [
        b"127.0.0.1:x@evil.example",
        b"[::1]evil.example",
        b"[::1]:80@evil.example",
        b"[::1",
        b"::1",
        b"[127.0.0.1]",
        b"localhost:70000",
        b"localhost:-1",
        b"localhost:80:80",
        b"localhost/",
        b"localhost#",
        b"local%68ost",
        b"http://localhost",
        b"localhost, localhost",
        b"\xff",
    ],
)
def test_what_is_no_host_and_port_is_refused_as_such(shared: Running, host: bytes) -> None:
    assert status(shared, "GET", "/health", ("host", host)) == 400


def test_a_host_is_told_once(shared: Running) -> None:
    assert status(shared, "GET", "/health", ("host", b"localhost"), ("host", b"localhost")) == 400
    assert raw_status(shared, b"GET /health HTTP/1.0\r\n\r\n") == 400


@pytest.mark.parametrize(
    ("target", "code"),
    [
        (b"http://localhost/health", 200),
        (b"HTTP://127.0.0.1:9/health?x", 200),
        (b"http://evil.example/health", 403),
        (b"http://localhost:1@evil.example/health", 400),
        (b"http://evil.example?/health", 400),
        (b"//evil.example/health", 404),
    ],
)
def test_a_target_that_names_a_host_counts_more_than_the_header(shared: Running, target: bytes, code: int) -> None:
    assert raw_status(shared, b"GET " + target + b" HTTP/1.1\r\nhost: localhost\r\n\r\n") == code


PIECES = ["localhost", "127.0.0.1", "[::1]", "::1", "[", "]", ":", "@", "80", "evil.example", "/", "?", "#", "%00", "."]


@given(st.lists(st.sampled_from(PIECES), max_size=5).map("".join))
def test_a_host_is_what_every_other_reader_of_it_takes_it_for(host: str) -> None:
    name = host_name(host)
    if name is not None:
        url = urlsplit(f"http://{host}")
        assert (url.hostname, url.username, url.path, url.query, url.fragment) == (name, None, "", "", "")


@pytest.mark.parametrize("wrong", ["localhost:x", "a b", "http://example.org", "[::1"])
def test_an_allowed_host_that_is_none_is_refused_at_start(wrong: str) -> None:
    with pytest.raises(ConfigError, match="is not a host"):
        Security(replace(CONFIG, allowed_hosts=(wrong,)))


@pytest.mark.parametrize("written", ["::1", "[::1]:80", "Example.org", "example.org:8080", "192.168.1.5"])
def test_an_allowed_host_may_be_written_in_all_usual_ways(written: str) -> None:
    security = Security(replace(CONFIG, allowed_hosts=(written,)))
    asked = f"[{written}]" if written == "::1" else written
    security.check_host([(b"host", asked.encode())])


@pytest.mark.parametrize(
    "host", [b"localhost", b"LOCALHOST:80", b"127.0.0.1:1", b"[::1]:30000", b"localhost:", b"[0:0:0:0:0:0:0:1]"]
)
def test_loopback_names_are_ours(shared: Running, host: bytes) -> None:
    assert status(shared, "GET", "/health", ("host", host)) == 200


def test_pages_of_other_sites_are_refused(shared: Running) -> None:
    assert status(shared, "GET", "/v1/models", ("origin", b"https://evil.example")) == 403
    assert status(shared, "GET", "/v1/models", ("origin", b"null")) == 403
    assert status(shared, "GET", "/v1/models", ("origin", f"http://127.0.0.1:{shared.port}".encode())) == 200


def test_what_a_page_of_another_site_embeds_has_no_origin_and_is_refused_all_the_same(shared: Running) -> None:
    for site in (b"cross-site", b"same-site", b"Cross-Site", b"nonsense"):
        for method, path in (("GET", "/v1/models"), ("GET", "/metrics"), ("POST", "/flush_cache")):
            assert status(shared, method, path, ("sec-fetch-site", site)) == 403
    twice = (("sec-fetch-site", b"same-origin"), ("sec-fetch-site", b"cross-site"))
    assert status(shared, "GET", "/v1/models", *twice) == 403
    for site in (b"same-origin", b"none"):
        assert status(shared, "GET", "/v1/models", ("sec-fetch-site", site)) == 200
    assert status(shared, "GET", "/", ("sec-fetch-site", b"cross-site")) == 200  # a link to the console


def test_a_page_whose_origin_is_configured_may_be_of_another_site(launch: Callable[..., Running]) -> None:
    server = launch(cors_origins=("https://friend.example",))
    for origin, code in ((b"https://friend.example", 200), (b"https://evil.example", 403)):
        headers = (("origin", origin), ("sec-fetch-site", b"cross-site"))
        assert status(server, "GET", "/v1/models", *headers) == code


COMPLETION = b'{"prompt":"Hi","max_tokens":2}'
AUTHORIZATION = b"Authorization: Bearer %b\r\n" % KEY.encode()
HOST, KIND = b"Host: localhost\r\n", b"Content-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("head", "trailer", "code"),
    [
        (HOST + KIND + AUTHORIZATION, b"", 200),
        (HOST + KIND + AUTHORIZATION, b"X-Checksum: 1\r\n", 200),
        (HOST + KIND, AUTHORIZATION, 401),
        (KIND + AUTHORIZATION, HOST, 400),
        (HOST + AUTHORIZATION, KIND, 415),
        (HOST + KIND + AUTHORIZATION, b"Origin: http://evil.example\r\n", 200),
        (HOST + KIND + AUTHORIZATION + b"Origin: http://evil.example\r\n", b"Origin: http://localhost\r\n", 403),
        (HOST + KIND + AUTHORIZATION, b"Content-Encoding: gzip\r\n", 200),
    ],
)
def test_what_comes_after_the_body_is_no_header(guarded: Running, head: bytes, trailer: bytes, code: int) -> None:
    chunks = b"\r\n%x\r\n%b\r\n0\r\n%b\r\n" % (len(COMPLETION), COMPLETION, trailer)
    start = b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n"
    assert raw_status(guarded, start + head + chunks) == code


def test_a_trailer_names_no_request_either(shared: Running) -> None:
    chunks = b"\r\n%x\r\n%b\r\n0\r\nX-Request-Id: late\r\n\r\n" % (len(COMPLETION), COMPLETION)
    start = b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n"
    assert b"late" not in raw_answer(shared, start + HOST + KIND + chunks)


@pytest.mark.parametrize("framing", [b"Content-Length: 5\r\n", b"Transfer-Encoding: identity\r\n"])
def test_a_body_has_one_length(shared: Running, framing: bytes) -> None:
    start = b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n"
    chunks = b"\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(COMPLETION), COMPLETION)
    assert raw_status(shared, start + framing + HOST + KIND + chunks) == 400


def raw_status(server: Running, content: bytes) -> int:
    return int(raw_answer(server, content)[9:12])


def raw_answer(server: Running, content: bytes) -> bytes:
    with server.connect() as sock:
        sock.sendall(content)
        return sock.recv(65536)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_a_network_address_without_a_key_is_refused_at_start(host: str) -> None:
    with pytest.raises(ConfigError, match="--api-key-file"):
        bind(replace(CONFIG, host=host))
    Security(replace(CONFIG, host=host, api_keys=("k",)))


def test_a_network_address_with_armed_faults_is_refused_before_anything_listens(monkeypatch) -> None:
    monkeypatch.setenv("FOREBAY_FAULTS", "engine.step=runtime")
    monkeypatch.setenv("FOREBAY_TEST_FAULTS", "1")
    with pytest.raises(ConfigError, match="FOREBAY_FAULTS"):
        bind(replace(CONFIG, host="0.0.0.0", api_keys=("k",)))
    bind(CONFIG).close()


def test_tenant_is_the_holder_of_a_key_and_admin_that_of_an_admin_key() -> None:
    security = Security(replace(CONFIG, api_keys=("a", "b"), admin_api_keys=("b", "c")))
    bearers = (b"Bearer a", b"Bearer b", b"Bearer c")
    a, b, c = (security.authorize(Access.USER, "/v1/models", [(b"authorization", value)]) for value in bearers)
    assert len({a.digest, b.digest, c.digest}) == 3
    assert [tenant.is_admin for tenant in (a, b, c)] == [False, True, True]
    assert a.digest != "a"
    without = Security(CONFIG).authorize(Access.USER, "/v1/models", [])
    assert (without.digest, without.is_admin) == (
        "",
        False,
    )  # who may flush a keyless server may not read others' prompts


def test_console_files_cannot_name_a_file_outside(shared: Running) -> None:
    for path in ("/console/../app.py", "/console/%2e%2e/app.py", "/console//etc/passwd", "/console/..%2fapp.py"):
        assert status(shared, "GET", path) == 404


def test_the_page_is_served_with_its_policy_and_without_a_key(guarded: Running) -> None:
    with guarded.client() as http:
        page = http.get("/")
        script = http.get("/console/app.js")
        again = http.get("/", headers={"if-none-match": page.headers["etag"]})
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'self'" in page.headers["content-security-policy"]
    assert script.headers["content-type"] == "text/javascript; charset=utf-8"
    assert page.headers["x-content-type-options"] == "nosniff"
    assert again.status_code == 304
