"""C29: nothing of one client's prompts reaches another, and no count beyond what `--cache-isolation` says."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from forebay.config.engine_config import CacheIsolation
from forebay.http.route import Access
from forebay.http.security import ALL_CLIENTS, ANYBODY, Isolation, Session, Tenant
from forebay.memory.radix_node import OPERATOR
from forebay.requests.updates import SpeculationReport
from forebay.server.app import ROUTES
from tests.scheduler.rig import Rig
from tests.server.caching_engine import PAGE, CachingEngine
from tests.server.conftest import Running
from tests.server.fake_engine import FakeEngine

Launch = Callable[..., Running]
ALICE, BOB, ADMIN = "alice-key", "bob-key", "admin-key"
SECRET = [100 + 7 * i for i in range(6 * PAGE)]  # ids of a prompt; none is a stranger's guess by chance
WRONG = 7


def usage(server: Running, prompt: list[int], key: str | None = None, **body: Any) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with server.client(headers=headers) as http:
        answer = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["usage"]
    return found


def cached(server: Running, prompt: list[int], key: str | None = None, **body: Any) -> int:
    count: int = usage(server, prompt, key, **body)["prompt_tokens_details"]["cached_tokens"]
    return count


def differs(server: Running, prompt: list[int], key: str | None = None, **body: Any) -> Any:
    return usage(server, prompt, key, **body)["cache"]["differs"]


@pytest.mark.parametrize("victim", [{}, {"user": "alice"}, {"prompt_cache_key": "a"}])
def test_a_prompt_cannot_be_read_out_of_the_cache_token_by_token(launch: Launch, victim: dict[str, Any]) -> None:
    """What every client of a keyless server could do: ask for the token behind a prefix, add it, ask again."""
    server = launch(CachingEngine)
    usage(server, SECRET, **victim)
    known: list[int] = []
    while len(known) < len(SECRET):
        found = differs(server, [*known, WRONG, WRONG + 4, WRONG + 6])
        if found is None or found.get("there") is None:
            break
        known += server.tokenizer.encode(found["there"])
    assert known == []


def test_nothing_in_the_usage_tells_a_right_guess_within_a_page(launch: Launch) -> None:
    """The position where two prompts part would be an oracle: one guess per request, token by token. The cache is
    flushed before every guess, which would be in it otherwise."""
    server = launch(CachingEngine)
    for length in (1, PAGE - 1, PAGE, PAGE + 1):
        told = []
        for right in range(min(PAGE, length + 1)):
            with server.client() as http:
                http.post("/flush_cache")
            usage(server, SECRET)
            guess = [*SECRET[: PAGE + right], *[WRONG] * (length - right)]
            told.append(usage(server, guess, user="mallory"))
        assert all(answer == told[0] for answer in told), told


@pytest.mark.parametrize("label", ["user", "safety_identifier", "prompt_cache_key", "cache_salt"])
def test_a_session_is_told_of_its_own_prompts_and_of_no_others(launch: Launch, label: str) -> None:
    server = launch(CachingEngine, api_keys=(ALICE, BOB), cache_isolation=CacheIsolation.NONE)
    usage(server, SECRET, ALICE, **{label: "one"})
    asked = [*SECRET[: PAGE + 1], WRONG]
    table = server.tokenizer.table
    here, there = (table.spelled(token).decode("utf-8", "replace") for token in (WRONG, SECRET[PAGE + 1]))
    assert differs(server, asked, ALICE, **{label: "two"}) is None
    assert differs(server, asked, BOB, **{label: "one"}) is None
    assert differs(server, asked, ALICE) is None
    own = differs(server, asked, ALICE, **{label: "one"})
    assert own == {"position": PAGE + 1, "here": here, "there": there, "reason": "text_changed"}


def test_an_admin_is_told_of_everybodys(launch: Launch) -> None:
    server = launch(CachingEngine, api_keys=(ALICE,), admin_api_keys=(ADMIN,), cache_isolation=CacheIsolation.NONE)
    usage(server, SECRET, ALICE)
    assert differs(server, [*SECRET[:5], WRONG], ALICE) is None
    assert differs(server, [*SECRET[:5], WRONG], ADMIN)["position"] == 5


def test_two_keys_never_meet_in_four_hundred_interleaved_probes(launch: Launch) -> None:
    """J-6, by counts: a tenant's hits are those on its own prompts, whole; never on the other's."""
    server = launch(CachingEngine, api_keys=(ALICE, BOB))
    rng = random.Random(6)
    prompts = [[200 + i, *SECRET] for i in range(40)]
    sent: set[tuple[str, int]] = set()
    with server.client() as http:
        for _ in range(400):
            key, number = rng.choice((ALICE, BOB)), rng.randrange(len(prompts))
            answer = http.post(
                "/v1/completions",
                json={"prompt": prompts[number], "max_tokens": 1},
                headers={"authorization": f"Bearer {key}"},
            ).json()["usage"]["cache"]
            own = (key, number) in sent
            assert answer["cached_tokens"] == (len(SECRET) if own else 0)
            assert answer["miss_reason"] == ("none" if own else "no_shared_prefix")
            sent.add((key, number))
    assert len(sent) > 60


@pytest.mark.parametrize(("namespace", "num_extends"), [("alice", 1), ("bob", 2)])
def test_a_computation_under_way_is_waited_for_within_its_namespace_only(namespace: str, num_extends: int) -> None:
    """Who waits for a prefix that somebody else computes learns by the wait that it is computed."""
    rig = Rig()
    prompt = list(range(1, 61))
    rig.add(prompt, 1, namespace="alice")
    rig.add(prompt, 1, namespace=namespace)
    rig.step()
    assert rig.plans[0].num_extends == num_extends


@pytest.mark.parametrize(
    ("isolation", "shared"),
    [
        (CacheIsolation.NONE, {"same", "other user", "other key"}),
        (CacheIsolation.KEY, {"same", "other user"}),
        (CacheIsolation.USER, {"same"}),
    ],
)
def test_who_hits_whose_prompts(launch: Launch, isolation: CacheIsolation, shared: set[str]) -> None:
    server = launch(CachingEngine, api_keys=(ALICE, BOB), cache_isolation=isolation)
    usage(server, SECRET, ALICE, user="u")
    probes = {
        "same": (ALICE, {"user": "u"}),
        "other user": (ALICE, {"user": "v"}),
        "other key": (BOB, {"user": "u"}),
        "other salt": (ALICE, {"user": "u", "cache_salt": "s"}),
    }
    hits = set()
    for name, (key, body) in probes.items():
        if cached(server, [*SECRET, WRONG], key, **body):
            hits.add(name)
    assert hits == shared


def test_a_salt_is_a_namespace_of_its_own_without_a_key_too(launch: Launch) -> None:
    server = launch(CachingEngine, cache_isolation=CacheIsolation.NONE)
    usage(server, SECRET)
    assert cached(server, SECRET, cache_salt="s") == 0
    assert cached(server, SECRET, cache_salt="s") > 0
    assert cached(server, SECRET, cache_salt="") > 0


LABELS = ["", "a", "b", "ab", "a\0b", "\0", "key", "none", "user", "\x91\xa1a", "a" * 64]


@pytest.mark.parametrize("isolation", CacheIsolation)
def test_no_label_that_a_client_can_choose_names_anothers_cache(isolation: CacheIsolation) -> None:
    """Names are equal where all that they stand for is equal, and only there."""
    names = Isolation(isolation)
    seen: dict[str, tuple[Any, ...]] = {}
    tenants = [Tenant(name) for name in LABELS]
    for tenant, user, salt in itertools.product(tenants, LABELS, LABELS):
        session = Session(user=user, prompt_cache_key=user[::-1], cache_salt=salt)
        meant: tuple[Any, ...] = {
            CacheIsolation.NONE: (salt,),
            CacheIsolation.KEY: (tenant, salt),
            CacheIsolation.USER: (tenant, user, salt),
        }[isolation]
        assert seen.setdefault(names.namespace(tenant, session), meant) == meant
    assert len(seen) == len(set(seen.values()))
    salted = Session(cache_salt="a")
    assert names.namespace(ANYBODY, salted) != Isolation(isolation).namespace(ANYBODY, salted)
    is_shared = isolation is CacheIsolation.NONE
    plain = names.namespace(ANYBODY, Session())
    assert (plain == Isolation(isolation).namespace(ANYBODY, Session())) is is_shared
    assert (plain == ALL_CLIENTS) is is_shared


def test_request_without_identity_is_a_new_author_each_time() -> None:
    names = Isolation(CacheIsolation.NONE)
    authors = {names.author(tenant, Session()) for tenant in (ANYBODY, ANYBODY, Tenant("a"), Tenant("a"))}
    assert len(authors) == 4
    assert OPERATOR not in authors
    assert names.author(Tenant("a"), Session("u")) == names.author(Tenant("a"), Session("u"))
    assert names.author(Tenant("a"), Session("u")) != names.author(Tenant("b"), Session("u"))
    assert names.author(Tenant("a"), Session("u")) != names.author(Tenant("a"), Session("", "u"))


@pytest.mark.parametrize(
    ("changes", "user_status"),
    [
        ({"api_keys": (ALICE, BOB), "admin_api_keys": (ADMIN,)}, 403),
        ({"api_keys": (ALICE, BOB)}, 404),
        ({"api_keys": (ALICE,), "cache_isolation": CacheIsolation.USER, "admin_api_keys": (ADMIN,)}, 403),
        ({"api_keys": (ALICE, BOB), "cache_isolation": CacheIsolation.NONE}, 200),
        ({"api_keys": (ALICE,), "admin_api_keys": (ADMIN,)}, 200),
    ],
)
def test_what_is_counted_over_all_tenants_is_for_admins(
    launch: Launch, changes: dict[str, Any], user_status: int
) -> None:
    server = launch(CachingEngine, **changes)
    for route in (route for route in ROUTES if route.access is Access.TOTALS):
        with server.client() as http:
            ask = partial(http.request, route.method, route.path, **({"json": {}} if route.body else {}))
            assert ask(headers={"authorization": f"Bearer {ALICE}"}).status_code == user_status
            if "admin_api_keys" in changes:
                assert ask(headers={"authorization": f"Bearer {ADMIN}"}).status_code == 200
    with server.client(headers={"authorization": f"Bearer {ALICE}"}) as http:
        info = http.get("/server_info").json()
    assert (info["state"] is None) == (user_status != 200)


def test_the_line_of_a_request_says_what_guessing_gained(launch: Launch, caplog: pytest.LogCaptureFixture) -> None:
    server = launch(FakeEngine)
    with server.client() as http, caplog.at_level(logging.INFO, logger="forebay"):
        for report in (None, SpeculationReport(accepted_per_step=2.25, net_speedup=1.75)):
            server.engine.speculation = report
            http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 2, "n": 2})
    before, after = (record.getMessage() for record in caplog.records if "output_tokens" in record.getMessage())
    assert "spec_net_speedup" not in before
    assert "spec_net_speedup=1.75" in after
    assert "accepted_per_step=2.25" in after


def test_the_log_has_counts_and_no_token_of_a_prompt(launch: Launch, caplog: pytest.LogCaptureFixture) -> None:
    server = launch(CachingEngine)
    with server.client() as http, caplog.at_level(logging.INFO, logger="forebay"):
        for end in ("canary", "other"):
            body = {"prompt": f"hello canary-prompt {end}", "max_tokens": 1, "user": "canary-user"}
            assert http.post("/v1/completions", json=body).json()["usage"]
    assert "event=finished" in caplog.text or "finished" in caplog.text
    assert "canary" not in caplog.text
