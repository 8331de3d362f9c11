"""Half a request: what a gateway says of the other half, in roles only; and what it knows a server of ours by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import httpx
import pytest

from forebay.base.proof import PROOF
from forebay.config.engine_config import DisaggregationMode
from forebay.requests.transfers import Rendezvous
from tests.proven import Proven, proof_for
from tests.server.conftest import MODEL, Running
from tests.server.fake_engine import FakeEngine

DECODE = replace(MODEL, mode=DisaggregationMode.DECODE)
PREFILL = replace(MODEL, mode=DisaggregationMode.PREFILL)
HERE = {"bootstrap_host": "10.0.0.7", "bootstrap_port": 7000, "bootstrap_room": 2**63 - 1}
Launch = Callable[..., Running]


KEY = b"cluster-canary-0123456789"
PROVEN = Proven(KEY)
SERVERS = ("10.0.0.7:7000", "Prefill.example")


def ask(
    server: Running,
    prompt: Any = "a",
    headers: Mapping[str, str] | None = None,
    auth: httpx.Auth | None = PROVEN,
    **fields: Any,
) -> Any:
    with server.client(headers=headers, auth=auth) as http:
        return http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2, **fields})


def test_a_gateways_words_reach_the_engine_once_for_each_choice(launch: Launch) -> None:
    server = launch(FakeEngine, model=DECODE, cluster_key=KEY)
    assert ask(server, **HERE).status_code == 200
    # What the field's gateways send where they know no port, and a room for each choice.
    assert ask(server, ["a", "b"], n=2, **{**HERE, "bootstrap_port": None, "bootstrap_room": [7, 3, 9, 1]}).is_success
    assert ask(server, n=2, **HERE).is_success
    with server.client(auth=PROVEN) as http:
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        assert http.post("/v1/chat/completions", json={**chat, **HERE}).is_success
    first, wrapped = Rendezvous("10.0.0.7", 7000, 2**63 - 1), Rendezvous("10.0.0.7", 7000, 0)
    four = [Rendezvous("10.0.0.7", 8998, room) for room in (7, 3, 9, 1)]
    assert server.engine.rendezvous == [first, *four, first, wrapped, first]


def test_prefill_needs_a_room_and_nothing_else(launch: Launch) -> None:
    server = launch(FakeEngine, model=PREFILL, cluster_key=KEY)
    assert ask(server, bootstrap_room=5).is_success
    assert server.engine.rendezvous == [Rendezvous("", 0, 5)]
    answer = ask(server)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "missing_field")
    assert answer.json()["error"]["param"] == "bootstrap_room"


@pytest.mark.parametrize(
    ("model", "fields", "code", "param"),
    [
        (MODEL, {"bootstrap_room": 5}, "unsupported_field", "bootstrap_room"),
        (MODEL, {"bootstrap_host": "here"}, "unsupported_field", "bootstrap_host"),
        (DECODE, {"bootstrap_room": 5}, "missing_field", "bootstrap_host"),
        (DECODE, {**HERE, "bootstrap_room": [1, 2]}, "invalid_value", "bootstrap_room"),
        (DECODE, {**HERE, "bootstrap_room": 2**63}, "invalid_value", "bootstrap_room"),
        (DECODE, {**HERE, "bootstrap_room": [-1]}, "invalid_value", "bootstrap_room"),
        (DECODE, {**HERE, "bootstrap_host": 5}, "invalid_value", "bootstrap_host"),
        (DECODE, {**HERE, "bootstrap_port": 65536}, "invalid_value", "bootstrap_port"),
    ],
)
def test_contradicting_bootstrap_fields_are_a_400_that_names_the_field(
    launch: Launch, model: Any, fields: dict[str, Any], code: str, param: str
) -> None:
    server = launch(FakeEngine, model=model, cluster_key=KEY)
    answer = ask(server, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"].partition(".")[0]) == (400, code, param), error
    assert server.engine.submitted == []


def test_gateways_of_the_field_find_what_they_look_for(launch: Launch) -> None:
    server = launch(FakeEngine, model=DECODE, cluster_key=KEY)
    with server.client() as http:
        info, model = http.get("/server_info").json(), http.get("/model_info").json()
        assert http.get("/version").status_code == 404
    known = {"served_model_name": "tiny", "model_path": "/models/tiny", "disaggregation_mode": "decode"}
    limits = {"max_running_requests": 64, "max_total_tokens": 1 << 16, "context_length": 4096}
    limits = {name: getattr(server.engine.info, name) for name in limits}
    assert known.items() | limits.items() <= {key: info[key] for key in (*known, *limits)}.items()
    assert all(isinstance(info[name], str) for name in ("version", "weight_version"))
    assert "model" not in info  # which would have to be text, and the gateway would take nothing of it all
    assert (model["model_path"], model["is_generation"]) == ("/models/tiny", True)


# -- who may choose (C33) ----------------------------------------------------------------------------------------------


def in_headers(**words: object) -> dict[str, str]:
    return {f"x-forebay-bootstrap-{name}": str(word) for name, word in words.items()}


def test_rendezvous_in_headers_of_a_key_holder_reaches_the_engine(launch: Launch) -> None:
    server = launch(FakeEngine, model=DECODE, cluster_key=KEY)
    where = in_headers(host="10.0.0.7", port=7000, room=2**63 - 1)
    assert ask(server, headers=where, n=2).is_success
    assert ask(server, headers=in_headers(host="::1", room=5)).is_success
    told = [Rendezvous("10.0.0.7", 7000, 2**63 - 1), Rendezvous("10.0.0.7", 7000, 0), Rendezvous("::1", 8998, 5)]
    assert server.engine.rendezvous == told


@pytest.mark.parametrize("model", [DECODE, PREFILL, MODEL], ids=["decode", "prefill", "whole"])
@pytest.mark.parametrize(
    ("headers", "auth"),
    [
        (in_headers(host="10.0.0.7", room=5), None),
        (in_headers(room=5), Proven(b"another-cluster-key")),
        ({**in_headers(room=5), PROOF: KEY.decode()}, None),
        ({PROOF: ""}, None),
        (in_headers(anything="5"), None),
    ],
    ids=["none", "another key", "the key itself", "empty", "unknown header"],
)
def test_rendezvous_in_headers_without_the_proof_is_a_403(
    launch: Launch, model: Any, headers: dict[str, str], auth: httpx.Auth | None
) -> None:
    server = launch(FakeEngine, model=model, cluster_key=KEY if model is not MODEL else b"")
    answer = ask(server, headers=headers, auth=auth)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "cluster_key_required")
    with server.client(headers=headers, auth=auth) as http:
        assert http.get("/v1/models").status_code == 403
    assert server.engine.submitted == []


@pytest.mark.parametrize("model", [DECODE, PREFILL], ids=["decode", "prefill"])
def test_rendezvous_in_the_body_without_the_proof_is_a_403(launch: Launch, model: Any) -> None:
    """A user's `bootstrap_host` made a decode server connect to any address."""
    server = launch(FakeEngine, model=model, cluster_key=KEY)
    for fields in (HERE, {"bootstrap_room": 5}, {"bootstrap_host": "169.254.169.254", "bootstrap_port": 80}):
        answer = ask(server, auth=None, **fields)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "cluster_key_required")
    with server.client() as http:
        messages = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        native = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
        for path, body in (("/v1/messages", messages), ("/v1/chat/completions", messages), ("/generate", native)):
            assert http.post(path, json={**body, **HERE}).status_code in (400, 403), path
    assert server.engine.submitted == []


def test_rendezvous_in_the_body_with_a_configured_prefill_server_is_taken(launch: Launch) -> None:
    """Gateways of the field have no proof, and pass their clients' headers on."""
    server = launch(FakeEngine, model=DECODE, cluster_key=KEY, prefill_servers=SERVERS)
    assert ask(server, auth=None, **HERE).is_success
    assert ask(server, auth=None, bootstrap_host="prefill.EXAMPLE", bootstrap_room=5).is_success
    for host, port in (("10.0.0.7", 7001), ("10.0.0.8", 7000), (["10.0.0.7", "10.0.0.8"], [7000, 7000])):
        many = {"n": 2, "bootstrap_room": [5, 6]} if isinstance(host, list) else {"bootstrap_room": 5}
        answer = ask(server, auth=None, bootstrap_host=host, bootstrap_port=port, **many)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "cluster_key_required")
        assert ask(server, bootstrap_host=host, bootstrap_port=port, **many).status_code == 403, "whoever asks"
    prefill = launch(FakeEngine, model=PREFILL, cluster_key=KEY, prefill_servers=SERVERS)
    assert ask(prefill, auth=None, bootstrap_room=5).is_success


@pytest.mark.parametrize("changes", [{"cluster_key": KEY}, {"insecure_no_cluster_key": True}], ids=["key", "no key"])
def test_list_of_prefill_servers_binds_each_sender(launch: Launch, changes: dict[str, Any]) -> None:
    server = launch(FakeEngine, model=DECODE, prefill_servers=SERVERS, **changes)
    auth = PROVEN if "cluster_key" in changes else None
    for host, port, status in (("10.0.0.7", 7000, 200), ("10.0.0.7", 7001, 403), ("169.254.169.254", 80, 403)):
        answer = ask(server, headers=in_headers(host=host, port=port, room=5), auth=auth)
        assert answer.status_code == status, answer.text
    with server.client(auth=auth) as http:
        asked = {"bootstrap_host": "169.254.169.254", "bootstrap_port": 80}
        assert http.post("/check_transfers", json=asked).status_code == 403
    assert "'169.254.169.254:80' is not among --disaggregation-prefill-servers" in answer.text


def recorded(server: Running, path: str = "/v1/completions", **fields: Any) -> httpx.Request:
    """A message of a key holder, as somebody between the machines reads it."""
    content = {"prompt": "a", "max_tokens": 2, **HERE, **fields}
    with server.client() as http:
        request = http.build_request("POST", path, json=content)
    request.headers[PROOF] = proof_for(KEY, request)
    return request


def test_proof_counts_once_for_its_own_message(launch: Launch) -> None:
    server, other = (launch(FakeEngine, model=DECODE, cluster_key=KEY) for _ in range(2))
    first = recorded(server)

    def send(to: Running = server, **changes: Any) -> tuple[int, str]:
        with to.client() as http:
            said = {"url": first.url.path, "headers": dict(first.headers), "content": first.content, **changes}
            answer = http.post(**said)
        return answer.status_code, "" if answer.is_success else answer.json()["error"]["code"]

    longer = first.content.replace(b'"max_tokens":2', b'"max_tokens":3')
    assert len(longer) == len(first.content)
    refused = (403, "cluster_key_required")
    assert send(url="/v1/chat/completions") == refused
    assert send(url="/v1/completions?x=1") == refused
    assert send(headers={**first.headers, **in_headers(room=6)}) == refused
    assert send(to=other, headers={**first.headers, "host": other.url.removeprefix("http://")}) == refused
    assert send() == (200, "")
    assert send() == (403, "proof_used")
    again = recorded(server)
    assert send(headers=dict(again.headers), content=longer) == refused, "another body"
    large = recorded(server, prompt="a" * 20_000)
    assert send(headers=dict(large.headers), content=large.content.replace(b"aaa", b"aab")) == refused


def test_proof_opens_the_checks_of_a_router_and_nothing_else(launch: Launch) -> None:
    keys = {"api_keys": ("sk-user-0123456789",), "admin_api_keys": ("sk-admin-0123456789",)}
    server = launch(FakeEngine, cluster_key=KEY, **keys)
    with server.client(auth=PROVEN) as http, server.client() as anybody:
        for path in ("/ready", "/server_info"):
            assert http.get(path).status_code == 200
            assert anybody.get(path).status_code == 401
        for path in ("/v1/models", "/metrics", "/debug/state", "/model_info"):
            assert http.get(path).status_code == 401, path
        assert http.post("/v1/completions", json={"prompt": "a"}).status_code == 401
        assert http.post("/flush_cache").status_code == 401


def test_rendezvous_without_any_key_is_anybodys_where_the_operator_allows_that(launch: Launch) -> None:
    server = launch(FakeEngine, model=DECODE, insecure_no_cluster_key=True)
    assert ask(server, auth=None, **HERE).is_success
    assert ask(server, headers=in_headers(host="127.0.0.1", room=5), auth=None).is_success
    closed = launch(FakeEngine, model=DECODE)
    assert ask(closed, auth=None, **HERE).status_code == 403


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        (in_headers(room="-1", host="a"), "bootstrap_room"),
        (in_headers(room="9" * 5000, host="a"), "bootstrap_room"),
        (in_headers(room=5, host="a", port="x"), "bootstrap_port"),
        (in_headers(room=5, host="a", port=0), "bootstrap_port"),
        (in_headers(room=5, host="a" * 300), "bootstrap_host"),
        (in_headers(room=5), "bootstrap_host"),
    ],
)
def test_rendezvous_in_headers_that_makes_no_sense_is_a_400(
    launch: Launch, headers: dict[str, str], param: str
) -> None:
    server = launch(FakeEngine, model=DECODE, cluster_key=KEY)
    answer = ask(server, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_rendezvous_header_that_comes_twice_is_a_400(launch: Launch) -> None:
    server = launch(FakeEngine, model=DECODE, cluster_key=KEY)
    twice = [*in_headers(room=5).items(), *in_headers(room=6).items()]
    with server.client() as http:
        answer = http.post("/v1/completions", json={"prompt": "a"}, headers=twice)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_header")


def test_rendezvous_in_headers_beside_the_body_s_own_is_a_400(launch: Launch) -> None:
    """The body is the client's, and a client of a router chooses no room."""
    server = launch(FakeEngine, model=DECODE, cluster_key=KEY)
    answer = ask(server, headers=in_headers(host="a", room=5), bootstrap_room=6)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported_field", "bootstrap_room")


def test_check_transfers_names_no_server_that_is_not_allowed(launch: Launch) -> None:
    asked: dict[str, Any] = {"bootstrap_host": "169.254.169.254", "bootstrap_port": 80}
    admin = {"authorization": "Bearer sk-admin-0123456789"}
    keys = {"api_keys": ("sk-user-0123456789",), "admin_api_keys": ("sk-admin-0123456789",)}
    server = launch(FakeEngine, model=DECODE, cluster_key=KEY, **keys)
    unkeyed = launch(FakeEngine, model=DECODE, cluster_key=KEY)
    with server.client() as http, unkeyed.client() as anybody:
        assert http.post("/check_transfers", json=asked, headers=admin).status_code != 403
        assert anybody.post("/check_transfers", json=asked).json()["error"]["code"] == "cluster_key_required"
        assert anybody.post("/check_transfers", json=asked, auth=PROVEN).status_code != 403
        assert anybody.post("/check_transfers", json={**asked, "bootstrap_host": "localhost"}).status_code != 403
