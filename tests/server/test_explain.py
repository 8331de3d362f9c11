"""`GET /debug/explain/{id}`: what became of a request, for the key that sent it and for no other."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from forebay.cli.main import main
from forebay.memory.miss_reason import MissReason
from forebay.requests.updates import CacheReport, History, MemoryReport, WaitedFor
from forebay.server.admin.explain import explanation_of
from forebay.server.api.core.ended import MOST_ENDED, Ended, ended_by_key
from tests.server.conftest import Running

Launch = Callable[..., Running]
ALICE, BOB, ADMIN = "alice-key", "bob-key", "admin-key"
SECRET = "nobody else may read this"


def ask(server: Running, key: str = "", **body: Any) -> str:
    """Ask for an answer, and return its id."""
    with server.client(headers={"authorization": f"Bearer {key}"} if key else {}) as http:
        answer = http.post("/v1/completions", json={"prompt": SECRET, "max_tokens": 2, **body})
    assert answer.status_code == 200, answer.text
    found: str = answer.headers["x-request-id"]
    return found


def explain(server: Running, request_id: str, key: str = "") -> Any:
    with server.client(headers={"authorization": f"Bearer {key}"} if key else {}) as http:
        return http.get(f"/debug/explain/{request_id}")


def ended(**changes: Any) -> Ended:
    values: dict[str, Any] = {
        "request_id": "one",
        "route": "/v1/completions",
        "model": "tiny",
        "ended_at": 1000.0,
        "total_s": 2.0,
        "first_token_s": 0.5,
        "prompt_tokens": 40,
        "output_tokens": 3,
        "finish": "stop",
        "error": None,
        "differs": None,
        "cache": CacheReport(16, MissReason.NONE, 16),
        "memory": MemoryReport(),
        "history": History(),
    }
    return Ended(**{**values, **changes})


def test_explanation_has_what_the_engine_reported_of_the_request(launch: Launch) -> None:
    server = launch()
    server.engine.cache = CacheReport(32, MissReason.STATE_MISSING, kv_tokens=64, resumable={"state": 32})
    server.engine.memory = MemoryReport(1, 40)
    server.engine.history = History(0.25, WaitedFor.MEMORY, 3)
    began = time.time()
    found = explain(server, ask(server)).json()
    assert began - 1 < found.pop("arrived") <= time.time()
    assert 0 <= found.pop("first_token_s") <= found.pop("total_s")
    assert found.pop("server").startswith(f"{socket.gethostname()}:")
    assert found.pop("prompt_tokens") == len(server.engine.submitted[0].prompt)
    assert len(found.pop("id")) == 24
    assert found == {
        "route": "/v1/completions",
        "model": "tiny",
        "waited_s": 0.25,
        "waited_for": "memory",
        "chunks": 3,
        "retractions": 1,
        "recomputed_tokens": 40,
        "output_tokens": 2,
        "finish": "length",
        "error": None,
        "cached_tokens": 32,
        "matched_tokens": {"kv": 64, "state": 32},
        "tiers": {},
        "miss_reason": "kv_present_state_missing",
        "nearest_prefix": 64,
        "difference": None,
        "would_help": [
            "more states (--max-mamba-cache-size), or mark the place with cache_control",
            "more memory for the KV cache, or a smaller max_tokens",
            "more memory for the KV cache, or a larger --schedule-conservativeness",
        ],
    }


@pytest.mark.parametrize("name", ["{}", "cmpl-{}", "chatcmpl-{}", "msg_{}", "resp_{}"])
def test_explanation_is_found_by_the_id_of_the_answer(launch: Launch, name: str) -> None:
    server = launch()
    request_id = ask(server)
    assert explain(server, name.format(request_id)).json()["id"] == request_id


def test_c29_explanation_is_for_the_key_of_the_request_alone(launch: Launch) -> None:
    server = launch(api_keys=(ALICE, BOB), admin_api_keys=(ADMIN,), key_names={ALICE: "alice", BOB: "bob"})
    request_id = ask(server, ALICE)
    assert explain(server, request_id, ALICE).status_code == 200
    assert SECRET.split()[0] not in explain(server, request_id, ALICE).text
    for key in (BOB, ADMIN):
        answer = explain(server, request_id, key)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "request_not_found")
    assert explain(server, request_id).status_code == 401


def test_explanations_are_of_the_last_requests_of_each_key() -> None:
    kept = ended_by_key()
    kept["b"].append(ended())
    for number in range(MOST_ENDED + 1):
        kept["a"].append(ended(request_id=str(number)))
    assert (len(kept["a"]), kept["a"][0].request_id, len(kept["b"])) == (MOST_ENDED, "1", 1)


def test_explanation_takes_at_most_a_kilobyte() -> None:
    longest = ended(
        request_id="x" * 128,
        route="/v1/chat/completions",
        model="m" * 64,
        finish="abort,length,stop,tool_calls",
        error="weights_changed",
        differs="arguments_rewritten",
        cache=CacheReport(
            10**6, MissReason.EVICTED, 10**6, {"state": 10**6, "window": 10**6}, 10**6, 1, 2, {"host": 10**6}
        ),
        memory=MemoryReport(100, 10**6),
        history=History(3599.9999, WaitedFor.TURN, 10**4),
    )
    assert len(msgspec.json.encode(explanation_of(longest, f"{'h' * 64}:65535"))) <= 1024


@pytest.mark.parametrize(
    ("changes", "number"),
    [
        ({}, 0),
        ({"history": History(0.05, WaitedFor.ROW)}, 0),
        ({"history": History(0.5, WaitedFor.ROW)}, 1),
        ({"history": History(0.5, WaitedFor.PREFIX)}, 0),
        ({"cache": CacheReport(0, MissReason.EMPTY)}, 1),
        ({"cache": CacheReport(0, MissReason.POOLING)}, 0),
        ({"cache": CacheReport(0, MissReason.EMPTY), "memory": MemoryReport(1, 3)}, 2),
    ],
)
def test_explanation_names_a_help_for_each_cause_that_has_one(changes: dict[str, Any], number: int) -> None:
    assert len(explanation_of(ended(**changes), "here")["would_help"]) == number


def test_explain_command_prints_an_explanation_for_people_and_programs(
    launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = launch()
    server.engine.cache = CacheReport(2, MissReason.EMPTY, 3)
    server.engine.memory, server.engine.history = MemoryReport(2, 40), History(0.25, WaitedFor.ROW, 1)
    request_id = ask(server)
    assert main(["explain", f"cmpl-{request_id}", f"--url={server.url}"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{request_id} on ")
    assert "waited 0.250 s for its row; prompt computed in 1 chunk; first token after 0." in printed
    assert "2 tokens after 0." in printed
    assert "retracted 2 times, 40 tokens computed again\n2 of " in printed
    assert "prompt tokens cached (kv 3), no_shared_prefix; nearest cached prefix 3 tokens\n" in printed
    assert printed.count("would help: ") == 3
    assert main(["explain", request_id, f"--url={server.url}", "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out)["id"] == request_id


@pytest.mark.parametrize(
    ("words", "message"),
    [([], "which request? Give the id"), (["nothing"], "no request 'nothing' is among the last 1000 of this key")],
)
def test_explain_command_without_a_known_request_says_so(
    launch: Launch, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *words, f"--url={launch().url}"]) != 0
    assert message in capsys.readouterr().err
