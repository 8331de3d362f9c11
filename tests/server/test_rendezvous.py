"""Half a request: what a gateway says of the other half, in roles only; and what it knows a server of ours by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from forebay.config.engine_config import DisaggregationMode
from forebay.requests.transfers import Rendezvous
from tests.server.conftest import MODEL, Running
from tests.server.fake_engine import FakeEngine

DECODE = replace(MODEL, mode=DisaggregationMode.DECODE)
PREFILL = replace(MODEL, mode=DisaggregationMode.PREFILL)
HERE = {"bootstrap_host": "10.0.0.7", "bootstrap_port": 7000, "bootstrap_room": 2**63 - 1}
Launch = Callable[..., Running]


def ask(server: Running, prompt: Any = "a", **fields: Any) -> Any:
    with server.client() as http:
        return http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2, **fields})


def test_a_gateways_words_reach_the_engine_once_for_each_choice(launch: Launch) -> None:
    server = launch(FakeEngine, model=DECODE)
    assert ask(server, **HERE).status_code == 200
    # What the field's gateways send where they know no port, and a room for each choice.
    assert ask(server, ["a", "b"], n=2, **{**HERE, "bootstrap_port": None, "bootstrap_room": [7, 3, 9, 1]}).is_success
    assert ask(server, n=2, **HERE).is_success
    with server.client() as http:
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
        assert http.post("/v1/chat/completions", json={**chat, **HERE}).is_success
    first, wrapped = Rendezvous("10.0.0.7", 7000, 2**63 - 1), Rendezvous("10.0.0.7", 7000, 0)
    four = [Rendezvous("10.0.0.7", 8998, room) for room in (7, 3, 9, 1)]
    assert server.engine.rendezvous == [first, *four, first, wrapped, first]


def test_prefill_needs_a_room_and_nothing_else(launch: Launch) -> None:
    server = launch(FakeEngine, model=PREFILL)
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
def test_what_makes_no_sense_of_a_half_is_a_400_that_names_the_field(
    launch: Launch, model: Any, fields: dict[str, Any], code: str, param: str
) -> None:
    server = launch(FakeEngine, model=model)
    answer = ask(server, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"].partition(".")[0]) == (400, code, param), error
    assert server.engine.submitted == []


def test_gateways_of_the_field_find_what_they_look_for(launch: Launch) -> None:
    server = launch(FakeEngine, model=DECODE)
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
