"""What `POST /debug/tree` tells of the prefix cache, and to whom."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from forebay.config.engine_config import CacheIsolation
from forebay.server.admin import prefix_tree
from tests.server.caching_engine import PAGE, CachingEngine
from tests.server.conftest import Running

Launch = Callable[..., Running]
ALICE, BOB, ADMIN = "alice-key", "bob-key", "admin-key"
PAGE_BYTES = 64 * PAGE


@pytest.fixture(autouse=True)
def each_look_is_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_tree, "KEPT_S", -1.0)


def page(first: int) -> list[int]:
    return list(range(first, first + PAGE))


def post(server: Running, path: str, body: dict[str, Any], key: str = "") -> Any:
    with server.client(headers={"authorization": f"Bearer {key}"} if key else {}) as http:
        return http.post(path, json=body)


def send(server: Running, *pages: int, key: str = "", **said: Any) -> None:
    prompt = [token for first in pages for token in page(first)]
    answer = post(server, "/v1/completions", {"prompt": [*prompt, 7], "max_tokens": 1, **said}, key)
    assert answer.status_code == 200, answer.text


def rows(server: Running, key: str = "", **body: Any) -> list[dict[str, Any]]:
    answer = post(server, "/debug/tree", body, key)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["rows"]
    return found


def test_branches_come_largest_first_with_all_that_is_below_them(launch: Launch) -> None:
    server = launch(CachingEngine)
    assert rows(server) == []
    send(server, 100, prompt_cache_key="mine")
    for branch in (10, 20, 30):
        send(server, 500, 600, branch, *([900] * (branch == 20)), prompt_cache_key="mine")
    large, small = rows(server, prompt_cache_key="mine")
    assert (small["num_tokens"], small["num_below"], small["num_branches"]) == (PAGE, 1, 0)
    assert (large["num_tokens"], large["num_tokens_below"], large["num_below"]) == (2 * PAGE, 6 * PAGE, 4)
    assert (large["num_bytes_below"], large["num_branches"], large["num_requests"]) == (6 * PAGE_BYTES, 3, 0)
    assert large["text"] == server.tokenizer.decode([*page(500), *page(600)], skip_special_tokens=False)
    below = rows(server, prompt_cache_key="mine", node=large["node"])
    assert [row["num_tokens"] for row in below] == [2 * PAGE, PAGE, PAGE]
    assert rows(server, node=large["node"], limit=1, offset=1)[0]["node"] == below[1]["node"]
    assert [row["node"] for row in rows(server)] == [large["node"], small["node"]], "names stay"


def test_a_branch_that_is_gone_or_never_was_is_said_to_be(launch: Launch) -> None:
    server = launch(CachingEngine)
    send(server, 100)
    (row,) = rows(server)
    assert post(server, "/flush_cache", {}).status_code == 200
    assert post(server, "/debug/tree", {"node": row["node"]}).json()["error"]["code"] == "no_branch"
    assert post(server, "/debug/tree", {"node": "no name"}).json()["error"]["param"] == "node"
    assert post(server, "/debug/tree", {"limit": 10_000}).json()["error"]["param"] == "limit"


def test_c29_text_is_of_ones_own_session_and_a_salted_cache_is_its_owners(launch: Launch) -> None:
    server = launch(CachingEngine)
    send(server, 100, prompt_cache_key="mine")
    send(server, 500)
    send(server, 900, 950, user="somebody")
    send(server, 20, 30, 40, cache_salt="secret")
    seen = rows(server, prompt_cache_key="mine")
    assert [(row["num_tokens"], row["text"] is None) for row in seen] == [
        (2 * PAGE, True),
        (PAGE, False),
        (PAGE, True),
    ]
    assert all(row["text"] is None for row in rows(server))
    (salted,) = rows(server, cache_salt="secret")
    assert salted["num_tokens"] == 3 * PAGE
    assert salted["text"]
    assert post(server, "/debug/tree", {"node": salted["node"]}).status_code == 404


def test_c29_separated_tenants_only_an_admin_sees_caches(launch: Launch) -> None:
    server = launch(CachingEngine, api_keys=(ALICE, BOB), admin_api_keys=(ADMIN,))
    send(server, 100, 200, key=ALICE, prompt_cache_key="a")
    send(server, 500, key=BOB)
    assert post(server, "/debug/tree", {"prompt_cache_key": "a"}, ALICE).status_code == 403
    alices, bobs = rows(server, ADMIN)
    assert (alices["num_tokens"], alices["num_tokens_below"], bobs["num_tokens_below"]) == (0, 2 * PAGE, PAGE)
    (row,) = rows(server, ADMIN, node=bobs["node"])
    assert row["text"] == server.tokenizer.decode(page(500), skip_special_tokens=False)


def test_c29_keys_that_share_a_cache_see_its_sizes_and_their_own_text(launch: Launch) -> None:
    server = launch(CachingEngine, api_keys=(ALICE, BOB), cache_isolation=CacheIsolation.NONE)
    send(server, 100, key=ALICE, user="u")
    assert rows(server, ALICE, user="u")[0]["text"]
    assert rows(server, BOB, user="u")[0]["text"] is None


def test_running_requests_are_counted_on_all_that_they_use(launch: Launch) -> None:
    server = launch(CachingEngine)
    send(server, 100, 200)
    cache = server.engine.core.scheduler.pools.cache
    pins = [server.call(_pin, server, end) for end in (1, 2, 2)]
    (upper,) = rows(server)
    (lower,) = rows(server, node=upper["node"])
    assert (upper["num_requests"], lower["num_requests"]) == (3, 2)
    for pin in pins:
        server.call(cache.unpin, pin)
    assert rows(server)[0]["num_requests"] == 0


def _pin(server: Running, num_pages: int) -> Any:
    """As a request does that goes on from so many pages of 100, 200."""
    cache = server.engine.core.scheduler.pools.cache
    (root,) = cache.index.roots.values()
    key = b"".join(token.to_bytes(4, "little") for token in [*page(100), *page(200)][: num_pages * PAGE])
    return cache.pin(cache.index.match(key, root.namespace), root.namespace)
