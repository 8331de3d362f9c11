"""What a client learns of the prefix cache, and what the engine learns of a conversation's places (C18, C20)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from forebay.base.errors import Conflict
from forebay.engine.lifecycle.tiers import NO_FOLDER
from forebay.memory.retention import NotKept
from forebay.requests.updates import CacheReport, MemoryReport, MissReason
from forebay.scheduler.state import PoolState
from tests.server.conftest import Running, start
from tests.server.fake_engine import FakeEngine
from tests.server.scripted_server import ScriptedServer
from tests.text.answers.templates import QWEN25
from tests.text.tiny_tokenizer import tiny_tokenizer

Launch = Callable[..., Running]
SYSTEM = {"role": "system", "content": "Answer in verse, and never in more than four lines."}
CHAT = {"messages": [SYSTEM, {"role": "user", "content": "hello world"}], "max_tokens": 2}


def chat(server: Running, **changes: Any) -> dict[str, Any]:
    with server.client() as http:
        answer = http.post("/v1/chat/completions", json={**CHAT, **changes})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def cached(server: Running, report: CacheReport, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    server.engine.cache = report
    with server.client() as http:
        found: dict[str, Any] = http.post(path, json={"max_tokens": 2, **body}).json()["usage"]["cache"]
    return found


def test_usage_says_what_was_found_by_kind_and_why_not_more(launch: Launch) -> None:
    """C20."""
    server = launch()
    report = CacheReport(32, MissReason.STATE_MISSING, kv_tokens=64, resumable={"window": 48, "state": 32})
    assert cached(server, report, prompt="hello world") == {
        "cached_tokens": 32,
        "miss_reason": "kv_present_state_missing",
        "matched_tokens": {"kv": 64, "window": 48, "state": 32},
        "differs": None,
        "retractions": 0,
        "tiers": {"device": 32},
        "recomputed_tokens": 0,
        "checkpoints": [],
        "kept_tokens": 0,
        "kept_until": None,
        "not_kept": "not_requested",
    }


@pytest.mark.parametrize(
    ("report", "seconds", "why"),
    [
        (MemoryReport(kept_tokens=32, kept_s=300.0, not_kept=""), 300, None),
        (MemoryReport(kept_tokens=32, kept_s=300.0, not_kept=NotKept.OVER_LIMIT), 300, "over_limit"),
        (MemoryReport(not_kept=MissReason.STATE_MISSING), None, "kv_present_state_missing"),
    ],
)
def test_usage_says_until_when_a_prefix_is_kept_or_why_not(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, report: MemoryReport, seconds: int | None, why: str | None
) -> None:
    """C20."""
    monkeypatch.setattr("forebay.server.api.core.generation.time.time", lambda: 1e9)
    server = launch()
    server.engine.memory = report
    found = cached(server, CacheReport(16, MissReason.NOT_CACHED, 16), prompt="hello")
    until = None if seconds is None else 10**9 + seconds
    assert (found["kept_tokens"], found["kept_until"], found["not_kept"]) == (report.kept_tokens, until, why)


def test_usage_says_what_was_computed_again_and_from_where_others_can_go_on(launch: Launch) -> None:
    server = launch()
    server.engine.memory = MemoryReport(1, 40, [16, 32])
    found = cached(server, CacheReport(16, MissReason.NOT_CACHED, 16), prompt="hello", n=2)
    assert (found["retractions"], found["recomputed_tokens"], found["checkpoints"]) == (2, 80, [16, 32])


def test_usage_names_no_kind_that_the_model_has_not(launch: Launch) -> None:
    server = launch()
    found = cached(server, CacheReport(32, MissReason.NONE, 32, {"state": 32}), prompt=["hello", "world"])
    assert found["matched_tokens"] == {"kv": 64, "state": 64}
    assert cached(server, CacheReport(32, MissReason.NONE, 32), prompt="hello")["matched_tokens"] == {"kv": 32}


def test_usage_shows_the_first_token_that_differs_in_text(launch: Launch) -> None:
    """C20."""
    server = launch()
    (here,), (there,) = server.tokenizer.encode(" world"), server.tokenizer.encode("hello")
    report = CacheReport(16, MissReason.DIVERGED, 16, differs_at=17, token_here=here, token_there=there)
    found = cached(server, report, "/v1/chat/completions", **CHAT)
    assert found["differs"] == {"position": 17, "here": " world", "there": "hello", "reason": "text_changed"}


def test_control_tokens_and_half_characters_have_a_spelling_too(launch: Launch) -> None:
    server = launch()
    half = server.tokenizer.encode("\u00e9")[0]
    report = CacheReport(16, MissReason.DIVERGED, differs_at=16, token_here=1, token_there=half)
    assert cached(server, report, prompt="hello")["differs"] == {
        "position": 16,
        "here": "<|im_start|>",
        "there": "\ufffd",
        "reason": "text_changed",
    }


def test_several_prompts_are_summed_and_the_first_one_is_explained(launch: Launch) -> None:
    server = launch()
    found = cached(server, CacheReport(8, MissReason.EVICTED, 8, {"state": 8}), prompt=["hello", "world"], n=2)
    assert found["cached_tokens"] == 16
    assert found["matched_tokens"]["kv"] == 16
    assert found["miss_reason"] == "evicted"


def test_save_cache_without_a_folder_is_409_and_says_what_to_set(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(question: type[object]) -> None:
        raise Conflict(NO_FOLDER, code="no_prefix_cache_dir")

    server = launch()
    monkeypatch.setattr(server.engine, "ask", refuse)
    with server.client() as http:
        answer = http.post("/save_cache")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "no_prefix_cache_dir")
    assert "--prefix-cache-dir DIR" in answer.text


def test_hits_and_misses_are_counted_by_reason_and_dead_kv_is_a_gauge(launch: Launch) -> None:
    """C20."""
    server = launch()
    server.engine.hybrid_pools = [
        PoolState(name="window", total=32, free=32, running=0),
        PoolState(name="state", total=16, free=11, running=0, cached=5),
    ]
    server.engine.counters = {
        "misses.none": 3.0,
        "misses.kv_present_state_missing": 2.0,
        "states_taken": 7.0,
        "states_skipped": 1.0,
        "states_evicted": 4.0,
        "dead_kv_tokens": 160.0,
        "cache_divergence.host_load": 1.0,
    }
    with server.client() as http:
        text = http.get("/metrics").text
    for line in (
        "forebay:cache_hit_total 3.0",
        'forebay:cache_miss_total{reason="kv_present_state_missing"} 2.0',
        'forebay:cache_divergence_total{mover="host_load"} 1.0',
        'forebay:cache_divergence_total{mover="step"} 0.0',
        "forebay:engine_states_taken_total 7.0",
        "forebay:engine_states_skipped_total 1.0",
        "forebay:engine_states_evicted_total 4.0",
        "forebay:dead_kv_tokens 160.0",
        'forebay:pool_slots{holder="cached",pool="state"} 5.0',
        'forebay:pool_size{pool="window"} 32.0',
    ):
        assert line in text, line


def test_a_plain_model_gets_no_resume_points(launch: Launch) -> None:
    server = launch()
    chat(server)
    assert server.engine.resume_points == [[]]


def test_a_model_with_states_learns_where_conversations_go_on(launch: Launch) -> None:
    """C18: in tokens of the prompt that the engine gets; of every choice's."""
    server = launch(lambda: FakeEngine(wants_resume_points=True))
    chat(server, n=2)
    prompt = server.engine.submitted[0].prompt
    assert server.engine.resume_points[0] == server.engine.resume_points[1]
    texts = [
        server.tokenizer.decode(prompt[:count], skip_special_tokens=False) for count in server.engine.resume_points[0]
    ]
    head = f"<|im_start|>system\n{SYSTEM['content']}<|im_end|>\n"
    assert texts == [head, f"{head}<|im_start|>user\n"]


@pytest.mark.parametrize(
    ("message", "ending"),
    [
        ({"content": "hello world", "cache_control": {"type": "ephemeral"}}, "hello world<|im_end|>\n"),
        (
            {
                "content": [
                    {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral", "ttl": "5m"}},
                    {"type": "text", "text": " world"},
                ]
            },
            "user\nhello",
        ),
    ],
)
def test_a_clients_cache_control_is_a_checkpoint(launch: Launch, message: dict[str, Any], ending: str) -> None:
    """C18."""
    server = launch(lambda: FakeEngine(wants_resume_points=True))
    chat(server, messages=[SYSTEM, {"role": "user", **message}])
    prompt = server.engine.submitted[0].prompt
    last = server.tokenizer.decode(prompt[: server.engine.resume_points[0][-1]], skip_special_tokens=False)
    assert last.endswith(ending)


@pytest.mark.parametrize("mark", [{"type": "forever"}, {}, "ephemeral"])
def test_another_cache_control_is_refused_by_name(launch: Launch, mark: Any) -> None:
    server = launch()
    with server.client() as http:
        body = {**CHAT, "messages": [{"role": "user", "content": "hello", "cache_control": mark}]}
        answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "cache_control" in answer.json()["error"]["param"]


@pytest.mark.parametrize(
    ("path", "needed"),
    [("/v1/chat/completions", {"max_tokens": 1}), ("/tokenize", {}), ("/apply-template", {})],
)
def test_cache_control_of_a_fifth_block_is_refused(launch: Launch, path: str, needed: dict[str, Any]) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "a", **mark}] * 2, **mark}, SYSTEM | mark]
    server = launch()
    with server.client() as http:
        four = http.post(path, json={**needed, "messages": messages})
        five = http.post(path, json={**needed, "messages": [*messages, messages[-1]]})
    assert (four.status_code, five.status_code) == (200, 400), four.text
    error = five.json()["error"]
    assert error["param"] == "messages.cache_control"
    assert "5 blocks have cache_control; at most 4 may" in error["message"]


MARKED: Final = [
    {"role": "system", "content": "You are brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    {"role": "user", "content": [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]},
]


FUNCTION: Final = {"name": "f", "parameters": {"type": "object"}}
TOOL: Final = {"type": "function", "function": FUNCTION}
SHORT: Final = {"cache_control": {"type": "ephemeral"}}
HOUR: Final = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


@pytest.fixture(scope="module")
def with_tools() -> Iterator[Running]:
    scripted = ScriptedServer(QWEN25)
    yield scripted.server
    scripted.server.close()


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "tools",
    [
        [TOOL | HOUR],
        [TOOL | {"function": FUNCTION | HOUR}],
        [TOOL | SHORT, {"type": "custom", "custom": {"name": "g"}} | HOUR],
    ],
    ids=["tool", "function", "the longest of several"],
)
def test_marked_tools_of_a_chat_are_kept_up_to_the_first_message_of_the_user(
    with_tools: Running, tools: list[dict[str, Any]]
) -> None:
    server = with_tools
    server.engine.retentions.clear()
    chat(server, tools=tools, **SHORT)
    (retentions,), prompt = server.engine.retentions, server.engine.submitted[-1].prompt
    texts = [server.tokenizer.decode(prompt[: asked.num_tokens], skip_special_tokens=False) for asked in retentions]
    assert [asked.ttl_s for asked in retentions] == [3600.0, 300.0]
    assert texts[0].endswith("<|im_start|>user\n")
    assert texts[1].endswith("hello world<|im_end|>\n")
    assert "cache_control" not in texts[1]


def test_cache_control_of_a_fifth_place_is_refused_with_tools_and_the_request_counted(with_tools: Running) -> None:
    said = {"role": "user", "content": [{"type": "text", "text": "a", **SHORT}] * 2}
    body = {"max_tokens": 1, "tools": [TOOL | SHORT], **SHORT}
    with with_tools.client() as http:
        four = http.post("/v1/chat/completions", json={**body, "messages": [said]})
        five = http.post("/v1/chat/completions", json={**body, "messages": [said | SHORT]})
    assert (four.status_code, five.status_code) == (200, 400), four.text
    assert "5 blocks have cache_control; at most 4 may" in five.json()["error"]["message"]


@pytest.mark.parametrize("hybrid", [False, True])
def test_marked_prefixes_are_kept_as_long_as_each_mark_says(launch: Launch, hybrid: bool) -> None:
    server = launch(lambda: FakeEngine(wants_resume_points=hybrid))
    chat(server, messages=MARKED)
    (retentions,), prompt = server.engine.retentions, server.engine.submitted[0].prompt
    texts = [server.tokenizer.decode(prompt[: asked.num_tokens], skip_special_tokens=False) for asked in retentions]
    assert [asked.ttl_s for asked in retentions] == [3600.0, 300.0]
    assert texts[0].endswith("You are brief.<|im_end|>\n")
    assert texts[1].endswith("user\nhello<|im_end|>\n")


def test_mark_whose_place_the_template_hides_keeps_the_whole_prompt() -> None:
    template = (
        "{% if messages|length < 3 %}{{ raise_exception('too few') }}{% endif %}"
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    server = start(tiny_tokenizer(template=template), FakeEngine)
    said = [{"role": role, "content": "hello"} for role in ("user", "assistant", "user")]
    chat(server, messages=[{**said[0], "cache_control": {"type": "ephemeral"}}, *said[1:]])
    assert server.engine.retentions == [[(len(server.engine.submitted[0].prompt), 300.0)]]
    server.close()


@pytest.mark.parametrize(("value", "ttl_s"), [("in_memory", 300.0), ("in-memory", 300.0), ("24h", 86400.0)])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/messages", {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}),
        ("/v1/responses", {"input": "hello"}),
    ],
)
def test_prompt_cache_retention_keeps_the_whole_prompt(
    launch: Launch, path: str, body: dict[str, Any], value: str, ttl_s: float
) -> None:
    server = launch()
    most = {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 1}
    with server.client() as http:
        answer = http.post(path, json={**body, **most, "prompt_cache_retention": value})
        refused = http.post(path, json={**body, **most, "prompt_cache_retention": "1y"})
    assert (answer.status_code, "x-forebay-ignored" in answer.headers) == (200, False), answer.text
    assert server.engine.retentions == [[(len(server.engine.submitted[0].prompt), ttl_s)]]
    assert refused.status_code == 400
    assert all(word in refused.text for word in ("prompt_cache_retention", "in_memory", "24h"))


@pytest.mark.parametrize(
    ("hints", "ttl_s"),
    [
        ({"cache_control": {"type": "ephemeral", "ttl": "90s"}}, 90.0),
        ({"cache_control": {"type": "ephemeral", "ttl": "9999h"}}, 86400.0),
        ({"cache_control": {"type": "ephemeral"}}, 300.0),
        ({"agent_hints": {"prefix_id": "a"}}, 0.0),
    ],
)
def test_hints_of_an_agent_keep_the_whole_prompt(launch: Launch, hints: dict[str, Any], ttl_s: float) -> None:
    server = launch()
    chat(server, nvext=hints)
    with server.client() as http:
        refused = http.post(
            "/v1/chat/completions", json={**CHAT, "nvext": {"cache_control": {"type": "x", "ttl": "1d"}}}
        )
    kept = [[(len(server.engine.submitted[0].prompt), ttl_s)]] if ttl_s else []
    assert server.engine.retentions == kept
    assert (refused.status_code, "nvext.cache_control" in refused.json()["error"]["param"]) == (400, True)


@pytest.mark.parametrize("ttl", ["2h", 300, ""])
def test_ttl_that_is_not_offered_is_refused_with_those_that_are(launch: Launch, ttl: Any) -> None:
    mark = {"type": "ephemeral", "ttl": ttl}
    server = launch()
    with server.client() as http:
        body = {**CHAT, "messages": [{"role": "user", "content": "hello", "cache_control": mark}]}
        answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "ttl" in answer.json()["error"]["param"]
    assert all(word in answer.json()["error"]["message"] for word in ("5m", "1h"))


def test_cache_control_with_an_unknown_field_counts_and_the_field_is_named_as_ignored(launch: Launch) -> None:
    server = launch(lambda: FakeEngine(wants_resume_points=True))
    mark = {"type": "ephemeral", "until": "1h"}
    with server.client() as http:
        body = {**CHAT, "messages": [{"role": "user", "content": "hello", "cache_control": mark}]}
        answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert "until" in answer.headers["x-forebay-ignored"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
def test_answer_has_the_header_of_its_cache(launch: Launch, path: str, stream: bool) -> None:
    """C20."""
    server = launch()
    server.engine.cache = CacheReport(2, MissReason.DIVERGED, 2)
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 2, "stream": stream}
    body |= {"prompt": "hello world"} if path == "/v1/completions" else CHAT
    with server.client() as http:
        answer = http.post(path, json=body)
    num_tokens = len(server.engine.submitted[-1].prompt)
    assert (answer.status_code, answer.headers["x-forebay-cache"]) == (200, f"2/{num_tokens} diverged")


def test_answer_of_several_prompts_has_the_sum_in_the_header_of_its_cache(launch: Launch) -> None:
    server = launch()
    server.engine.cache = CacheReport(1, MissReason.NOT_CACHED, 1)
    with server.client() as http:
        pooled = http.post("/v1/embeddings", json={"input": [[1, 2, 3], [4, 5]]})
        written = http.post("/v1/completions", json={"prompt": [[1, 2, 3], [4, 5]], "n": 2, "max_tokens": 1})
        refused = http.post("/v1/completions", json={"prompt": ""})
    assert pooled.headers["x-forebay-cache"] == written.headers["x-forebay-cache"] == "2/5 not_cached_yet"
    assert "x-forebay-cache" not in refused.headers
