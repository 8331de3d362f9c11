"""What `GET /debug/cache/what-if` says, and to whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forebay.config.engine_config import CacheIsolation
from forebay.engine.frames import ReuseReport
from forebay.memory.ghosts import Reuse
from tests.server.conftest import Running

Launch = Callable[..., Running]
ALICE, BOB, ADMIN = "alice-key", "bob-key", "admin-key"
GIB = 1 << 30


def ask(server: Running, key: str = "") -> Any:
    with server.client(headers={"authorization": f"Bearer {key}"} if key else {}) as http:
        return http.get("/debug/cache/what-if")


def test_what_if_says_what_was_reused_and_would_be(launch: Launch) -> None:
    server = launch()
    assert ask(server).json() == {"keys": []}
    found = Reuse(1000, 610, {"device": [600, 770, 1100], "host": [600, 600, 600]})
    server.engine.reuse_report = ReuseReport(0, {"device": 8 * GIB, "host": 4 * GIB}, {"": found})
    (row,) = ask(server).json()["keys"]
    assert (row["key"], row["prompt_tokens"], row["reuse"]) == ("", 1000, 0.61)
    assert [(size["tier"], size["factor"], size["more_bytes"], size["reuse"]) for size in row["sizes"]] == [
        ("device", 2, 8 * GIB, 0.78),
        ("device", 4, 24 * GIB, 1.0),
        ("host", 2, 4 * GIB, 0.61),
        ("host", 4, 12 * GIB, 0.61),
    ]


def test_what_if_of_a_key_without_prompts_is_zero(launch: Launch) -> None:
    server = launch()
    server.engine.reuse_report = ReuseReport(0, {"device": GIB}, {"": Reuse(0, 0, {"device": [0, 0, 0]})})
    (row,) = ask(server).json()["keys"]
    assert [row["reuse"], *(size["reuse"] for size in row["sizes"])] == [0.0, 0.0, 0.0]


def test_c29_what_if_a_user_sees_their_own_key_and_an_admin_all(launch: Launch) -> None:
    keys: dict[str, Any] = {"api_keys": (ALICE, BOB), "admin_api_keys": (ADMIN,)}
    keys["key_names"] = {ALICE: "alice", BOB: "bob"}
    for isolation, may in ((CacheIsolation.NONE, True), (CacheIsolation.KEY, False)):
        server = launch(**keys, cache_isolation=isolation)
        reuse = Reuse(10, 5, {"device": [5, 6, 7]})
        server.engine.reuse_report = ReuseReport(0, {"device": GIB}, {"alice": reuse, "bob": reuse})
        assert [row["key"] for row in ask(server, ADMIN).json()["keys"]] == ["alice", "bob"]
        answer = ask(server, ALICE)
        assert answer.status_code == (200 if may else 403)
        if may:
            assert [row["key"] for row in answer.json()["keys"]] == ["alice"]
