"""Scorecard J-1, J-4: nobody gets in without a key, nor through a name that is not ours."""

from __future__ import annotations

import http.client
from collections.abc import Callable
from dataclasses import replace

import pytest
from fastapi.routing import APIRoute

from forebay.base.errors import ConfigError
from forebay.server.app import ROUTES
from forebay.server.security import Security
from forebay.server.serve import bind
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
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
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
]
PATHS = [path.replace("{model_id:path}", "tiny") for _, path, _, _ in ROUTES]
TRICKS = ["/openapi.json", "/docs", "//v1/models", "/v1/..;/models", "/health/", "/health%2f", "/x/health?", "/Health"]
TRICKS += ["/health/../v1/models", "/%2e/v1/models", "/console/../v1/models", "/v1/models?path=/health", "/;/health"]


@pytest.mark.parametrize("path", sorted({*PATHS, *TRICKS} - {"/health"}))
def test_nothing_but_health_is_served_without_a_key(guarded: Running, path: str) -> None:
    for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE"):
        for headers in REFUSED:
            assert status(guarded, method, path, *headers) == 401, (method, headers)


def test_the_routes_tried_are_all_there_are(tokenizer) -> None:
    import asyncio

    from forebay.server.app import create_context, create_routes
    from tests.server.conftest import MODEL

    async def paths() -> set[str]:
        context = create_context(CONFIG, MODEL, FakeEngine(), tokenizer)
        return {route.path for route in create_routes(context, {}).routes if isinstance(route, APIRoute)}

    assert asyncio.run(paths()) == {path for _, path, _, _ in ROUTES}


def test_health_needs_no_key_but_only_by_get(guarded: Running) -> None:
    assert status(guarded, "GET", "/health") == 200
    assert status(guarded, "GET", "/health?x=1") == 200
    assert status(guarded, "POST", "/health") == 401


def test_a_key_opens_the_api_and_only_the_admin_key_the_admin_routes(guarded: Running) -> None:
    assert status(guarded, "GET", "/v1/models", bearer(KEY)) == 200
    assert status(guarded, "GET", "/metrics", bearer(ADMIN)) == 200
    assert status(guarded, "POST", "/flush_cache", bearer(KEY)) == 403
    assert status(guarded, "POST", "/flush_cache", bearer(ADMIN)) == 200


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


@pytest.mark.parametrize("host", [b"localhost", b"LOCALHOST:80", b"127.0.0.1:1", b"[::1]:30000"])
def test_loopback_names_are_ours(shared: Running, host: bytes) -> None:
    assert status(shared, "GET", "/health", ("host", host)) == 200


def test_pages_of_other_sites_are_refused(shared: Running) -> None:
    assert status(shared, "GET", "/v1/models", ("origin", b"https://evil.example")) == 403
    assert status(shared, "GET", "/v1/models", ("origin", b"null")) == 403
    assert status(shared, "GET", "/v1/models", ("origin", f"http://127.0.0.1:{shared.port}".encode())) == 200


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


def test_tenants_do_not_share_a_namespace_and_cannot_name_anothers() -> None:
    security = Security(replace(CONFIG, api_keys=("a", "b")))
    a, b = (security.authorize("GET", "/v1/models", [(b"authorization", b"Bearer " + key)]) for key in (b"a", b"b"))
    names = {security.namespace(tenant, salt) for tenant in (a, b) for salt in (None, "", "x", f"{b}\0x")}
    assert len(names) == 6  # None and "" are the same salt
    assert security.namespace(a, "x") == security.namespace(a, "x")


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
