"""`forebay verify --url`: a server whose answers depend on something is found, and what they depend on is named."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from forebay.base.errors import ConfigError, EngineError, ForebayError, Unauthorized, Unavailable
from forebay.cli.commands import run as forebay
from forebay.verify.remote.circumstances import Group, circumstances
from forebay.verify.remote.questions import make_questions, read_questions, sibling
from forebay.verify.remote.replies import Reply, first_difference
from forebay.verify.remote.report import as_html, as_json, left_out_lines, outcome_lines, summary_text
from forebay.verify.remote.run import Comparison, Outcome, verdict_text
from forebay.verify.remote.server import RateLimited, Refused, Server
from forebay.verify.verdict import Verdict, exit_code
from tests.deadlines import HANGS_S
from tests.verify.fake_server import FakeServer

MAX_TOKENS = 6


async def _compared(
    fake: FakeServer, *, context: int = 600, budget_s: float = HANGS_S, spent: bool = False
) -> tuple[Comparison, list[Outcome]]:
    async with fake.listening():
        server = await Server.find(fake.url, None, "")
        try:
            questions = make_questions(1, context, MAX_TOKENS)
            comparison = Comparison([server], questions, max_tokens=MAX_TOKENS, seed=1, budget_s=budget_s)
            await comparison.ask_alone()
            if spent:
                comparison._deadline = 0.0
            outcomes = []
            for circumstance in comparison.circumstances:
                fake.gather, fake.awaits_long = circumstance.size + 1, circumstance.group is Group.ARRIVALS
                outcomes.append(await comparison.outcome(circumstance))
                fake.gather = 1
            return comparison, outcomes
        finally:
            await server.aclose()


def _verdicts(outcomes: list[Outcome]) -> dict[str, Verdict]:
    return {outcome.name: outcome.verdict for outcome in outcomes}


def test_server_with_the_same_answers_everywhere_is_shown_in_each_circumstance() -> None:
    comparison, outcomes = asyncio.run(_compared(FakeServer()))
    assert set(_verdicts(outcomes).values()) == {Verdict.SAME}
    assert all(outcome.findings.num_answers == len(comparison.alone) == 7 for outcome in outcomes)
    assert verdict_text(outcomes) == f"no answer differs in the {len(outcomes)} circumstances that were shown"
    assert exit_code(outcomes, len(outcomes)) == 0
    assert exit_code(outcomes, len(outcomes) + 1) == 2


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("fake", "different", "verdict"),
    [
        (FakeServer(batch_from=5), {"beside 4", "beside 16", "beside 64"}, "the batch, from 4 requests beside it on"),
        (FakeServer(batch_from=2), None, "the batch, from 1 request beside it on"),
        (FakeServer(wrong_from_cache=True), {"from the prefix cache", "after a similar prompt", "after an abort"},
         "answers depend on the prefix cache"),
        (FakeServer(wrong_in_stream=True), None, "the form in which they are asked for"),
        (FakeServer(wrong_without_logprobs=True), {"without log-probabilities"}, "the form"),
        (FakeServer(wrong_after_abort=True), None, "an aborted request before them"),
        (FakeServer(wrong_beside_long=True), None, "prompts that arrive meanwhile"),
    ],
    ids=["batch", "pair", "cache", "stream", "logprobs", "abort", "arrivals"],
)  # fmt: skip
def test_fault_of_a_server_is_found_and_named(fake: FakeServer, different: set[str] | None, verdict: str) -> None:
    outcomes = asyncio.run(_compared(fake))[1]
    found = {name for name, verdict in _verdicts(outcomes).items() if verdict is Verdict.DIFFERENT}
    assert found == different if different is not None else found
    assert verdict in verdict_text(outcomes)
    assert exit_code(outcomes, 1) == 1


def test_difference_names_tokens_and_the_gap_that_the_expected_one_had_alone() -> None:
    outcomes = asyncio.run(_compared(FakeServer(batch_from=17)))[1]
    difference = next(outcome for outcome in outcomes if outcome.name == "beside 16").findings.differences[0]
    assert (difference.unit, difference.place, difference.found, difference.gap) == ("token", 5, "wrong", 1.0)
    assert difference.texts[0] != difference.texts[1]
    assert all(text.endswith("\n[finish_reason: length]") for text in difference.texts)


def test_outcome_names_how_far_log_probabilities_of_equal_tokens_are_apart() -> None:
    outcomes = asyncio.run(_compared(FakeServer(drift_from=5)))[1]
    lines = {outcome.name: " ".join(" ".join(outcome_lines(outcome)).split()) for outcome in outcomes}
    assert lines["beside 1"] == "same beside 1 up to 1 other in flight"
    assert lines["beside 4"] == "same beside 4 up to 4 others in flight; log-probabilities up to 0.25 apart"
    assert "are up to 0.25 apart. Verdict: no answer differs in the 11" in summary_text(outcomes)


def test_circumstances_that_take_long_come_last() -> None:
    """A prompt of 2,000 tokens arrives for each token of an answer: this took two thirds of vLLM's 15 minutes."""
    assert circumstances()[-1].group is Group.ARRIVALS


def test_server_without_log_probabilities_is_compared_by_text() -> None:
    outcomes = asyncio.run(_compared(FakeServer(batch_from=5, gives_logprobs=False)))[1]
    verdicts = _verdicts(outcomes)
    assert verdicts["without log-probabilities"] is Verdict.NOT_SHOWN
    difference = next(outcome for outcome in outcomes if outcome.name == "beside 4").findings.differences[0]
    assert (difference.unit, difference.gap) == ("text", None)
    assert difference.found.startswith("wrong")


def test_requests_that_differ_when_repeated_are_named_and_asked_no_further() -> None:
    comparison, outcomes = asyncio.run(_compared(FakeServer(unsteady=frozenset({"seed"}))))
    assert verdict_text(outcomes) == "2 of 7 requests (sampled by seed) are answered differently when repeated"
    assert len(comparison.alone) == 5


def test_server_whose_answers_depend_on_the_salt_is_found_and_named() -> None:
    comparison, outcomes = asyncio.run(_compared(FakeServer(wrong_with_a_salt=True)))
    assert "7 of 7 requests" in verdict_text(outcomes)
    assert verdict_text(outcomes).endswith("are answered differently with another cache_salt")
    assert (comparison.alone, exit_code(outcomes, 1)) == ([], 1)


def test_server_that_never_repeats_itself_leaves_nothing_to_compare() -> None:
    outcomes = asyncio.run(_compared(FakeServer(unsteady=frozenset({"seed", "greedy"}))))[1]
    assert outcomes[0].verdict is Verdict.DIFFERENT
    assert {outcome.verdict for outcome in outcomes[1:]} == {Verdict.LEFT_OUT}


@pytest.mark.parametrize(
    ("owner", "hint"),
    [
        ("library", ""),
        ("vllm", ", unless it is started with --enable-prompt-tokens-details"),
        ("sglang", ", unless it is started with --enable-cache-report"),
    ],
)
def test_cache_that_nothing_reports_is_not_shown(owner: str, hint: str) -> None:
    outcomes = asyncio.run(_compared(FakeServer(owner=owner, reports_cached=False)))[1]
    cached = [outcome for outcome in outcomes if outcome.group is Group.CACHE]
    assert {outcome.verdict for outcome in cached} == {Verdict.NOT_SHOWN}
    assert {outcome.what for outcome in cached} == {f"the server does not report cached tokens{hint}"}


def test_requests_are_salted_where_the_server_has_salts_unless_the_cache_is_compared() -> None:
    fake = FakeServer()
    asyncio.run(_compared(fake))
    salts = [body["cache_salt"] for body in fake.bodies if "cache_salt" in body]
    assert len(set(salts)) == len(salts)
    llama = FakeServer(owner="llamacpp")
    asyncio.run(_compared(llama))
    assert {body.get("cache_prompt") for body in llama.bodies} == {False, None}
    other = FakeServer(owner="library")
    asyncio.run(_compared(other))
    assert not any({"cache_salt", "cache_prompt"} & body.keys() for body in other.bodies)


def test_question_that_the_server_refuses_is_left_out_with_the_reason() -> None:
    comparison, outcomes = asyncio.run(_compared(FakeServer(refuses="tools")))
    assert [one.question.way for one in comparison.unanswered] == ["tools", "tools"]
    assert "tools is unknown" in comparison.unanswered[0].reason
    assert set(_verdicts(outcomes).values()) == {Verdict.SAME}
    assert exit_code([*outcomes, *comparison.unanswered], len(outcomes)) == 0


def test_budget_that_is_spent_leaves_the_rest_out_and_shows_nothing() -> None:
    _, outcomes = asyncio.run(_compared(FakeServer(), spent=True))
    assert {outcome.verdict for outcome in outcomes} == {Verdict.LEFT_OUT}
    assert exit_code(outcomes, 1) == 2


def test_server_that_answers_nothing_is_one_error_at_the_end_of_the_budget() -> None:
    with pytest.raises(Unavailable, match=r"nothing within the budget of 0\.05 s"):
        asyncio.run(_compared(FakeServer(gather=2), budget_s=0.05))


def test_server_that_does_not_say_its_models_is_one_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(Unavailable, match="does not answer in time"):
            asyncio.run(Server.find(url, None, "", most_s=0.05))


@pytest.mark.parametrize(
    ("fake", "error", "message"),
    [
        (FakeServer(status=401), Unauthorized, "--api-key-file"),
        (FakeServer(status=429), RateLimited, "limits the rate"),
        (FakeServer(status=500), EngineError, "answered 500: no"),
        (FakeServer(status=400), Refused, "no question was answered"),
        (FakeServer(body=b"<html>"), EngineError, "not of the OpenAI API"),
        (FakeServer(body=b"[]"), EngineError, "not of the OpenAI API"),
        (FakeServer(body=b'{"choices": [{"message": 5}]}'), EngineError, "not of the OpenAI API"),
        (FakeServer(body=b'{"choices": []}'), EngineError, "without `choices`"),
        (FakeServer(models=()), EngineError, "lists no model"),
    ],
)  # fmt: skip
def test_server_that_cannot_be_compared_is_one_error(fake: FakeServer, error: type[ForebayError], message: str) -> None:
    with pytest.raises(error, match=message):
        asyncio.run(_compared(fake))


def test_request_that_is_refused_with_log_probabilities_is_compared_without_them() -> None:
    """llama-server refuses log-probabilities in streams of requests with tools."""
    fake = FakeServer(refuses_logprobs=("tools", "stream"))
    comparison, outcomes = asyncio.run(_compared(fake))
    assert not comparison.unanswered
    assert set(_verdicts(outcomes).values()) == {Verdict.SAME}
    assert all(outcome.findings.num_answers == 7 for outcome in outcomes)
    streamed = [body for body in fake.bodies if {"tools", "stream"} <= body.keys()]
    assert {"logprobs" in body for body in streamed} == {True, False}


def test_server_that_fails_in_the_middle_is_compared_by_what_it_answered_before() -> None:
    """A rate limit from the fourth request on."""
    comparison, outcomes = asyncio.run(_compared(FakeServer(status=429, good=3)))
    assert (len(comparison.alone), len(comparison.unanswered)) == (3, 1)
    assert "limits the rate" in comparison.unanswered[0].reason
    assert comparison.unanswered[0].verdict is Verdict.LEFT_OUT
    assert verdict_text(outcomes) == f"no circumstance was shown; requests failed in {len(outcomes)}"
    assert ["4 longest prompts" in line for line in left_out_lines(comparison)] == [False, False]
    assert ["3 longest prompts" in line for line in left_out_lines(comparison)] == [False, True]
    assert {outcome.verdict for outcome in outcomes} == {Verdict.FAILED}
    assert all("limits the rate" in outcome.what and "\n" not in outcome.what for outcome in outcomes)
    assert exit_code(outcomes, 1) == 1


def test_request_that_fails_alone_is_a_failure_though_all_circumstances_are_the_same() -> None:
    fake = FakeServer(fails_on="tools")
    comparison, outcomes = asyncio.run(_compared(fake))
    assert [(one.question.way, one.verdict) for one in comparison.unanswered] == [("tools", Verdict.FAILED)]
    assert next(left_out_lines(comparison)).startswith("failed    tools")
    assert "<li>failed    tools" in as_html(comparison, outcomes, "")
    assert set(_verdicts(outcomes).values()) == {Verdict.SAME}
    assert exit_code([*outcomes, *comparison.unanswered], 1) == 1
    with _running(fake) as url:
        assert forebay(["verify", "--url", url, "--only=streamed", "--max-tokens=6", f"--budget={HANGS_S}s"]) == 1


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize("garbage", [b"data: {\r\n\r\n", b"data: [1]\r\n\r\n", b'data: {"choices": [7]}\r\n\r\n'])
def test_server_that_streams_garbage_fails_where_it_streams_and_is_compared_elsewhere(garbage: bytes) -> None:
    outcomes = asyncio.run(_compared(FakeServer(garbage=garbage)))[1]
    failed = {outcome.name: outcome.what for outcome in outcomes if outcome.verdict is Verdict.FAILED}
    assert failed.keys() == {"streamed", "after an abort", "long prompts arrive"}
    assert all("not of the OpenAI API" in what and "\n" not in what for what in failed.values())
    assert {outcome.verdict for outcome in outcomes if outcome.name not in failed} == {Verdict.SAME}
    assert exit_code(outcomes, 1) == 1


def test_failure_in_a_circumstance_is_its_outcome_and_the_others_are_asked() -> None:
    async def failing() -> list[Outcome]:
        fake = FakeServer()
        async with fake.listening():
            server = await Server.find(fake.url, None, "")
            questions = make_questions(1, 600, MAX_TOKENS)
            comparison = Comparison([server], questions, max_tokens=MAX_TOKENS, seed=1, budget_s=HANGS_S)
            await comparison.ask_alone()
            fake.status = 429
            first = await comparison.outcome(comparison.circumstances[3])
            fake.status = 200
            second = await comparison.outcome(comparison.circumstances[0])
            await server.aclose()
            return [first, second]

    first, second = asyncio.run(failing())
    assert (first.verdict, second.verdict) == (Verdict.FAILED, Verdict.SAME)
    assert "limits the rate" in first.what
    assert exit_code([first, second], 1) == 1


def test_address_model_and_prompts_that_are_wrong_name_what_is_there(tmp_path: Path) -> None:
    async def find(url: str, model: str | None) -> None:
        fake = FakeServer(models=("small", "large"))
        async with fake.listening():
            await Server.find(url or fake.url, model, "")

    with pytest.raises(ConfigError, match="small, large"):
        asyncio.run(find("", "medium"))
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        asyncio.run(find("ftp://x", None))
    with pytest.raises(Unavailable, match="no server answers"):
        asyncio.run(find("http://127.0.0.1:9", None))
    file = tmp_path / "prompts.jsonl"
    for text, message in (
        ("", "no lines"),
        ("{", "line 1 is no JSON"),
        ("[1]", "line 1 must be"),
        ('{"messages": 3}', "must be"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_questions(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_questions(tmp_path / "nothing")


def test_own_prompts_are_greedy_or_have_a_seed(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    sampled = {"prompt": "Once", "temperature": 1, "model": "other", "stream": True}
    file.write_text(json.dumps(sampled) + '\n\n"Hello"\n')
    questions = sorted(read_questions(file), key=lambda question: question.number)
    assert questions[0].fields == {"prompt": "Once", "temperature": 1, "seed": 1}
    assert questions[1].fields == {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0.0}
    assert [question.way for question in questions] == ["sampled by seed", "greedy"]


def test_sibling_begins_like_the_question_and_continues_differently() -> None:
    import random

    question = make_questions(1, None, MAX_TOKENS)[7]
    own, other = (fields["messages"][0]["content"] for fields in (question.fields, sibling(question, random.Random(2))))
    shared = len(own) * 3 // 4
    assert own[:shared] == other[:shared]
    assert own[shared:] != other[shared:]
    assert len(own) == len(other)


def test_reply_of_calls_in_pieces_equals_that_of_the_whole() -> None:
    call = {"function": {"name": "look_up", "arguments": '{"word": "oak"}'}}
    whole = Reply.of_body(
        {"choices": [{"message": {"content": None, "tool_calls": [call]}, "finish_reason": "tool_calls"}]}
    )
    streamed = Reply()
    for delta in (
        {"tool_calls": [{"index": 0, "function": {"name": "look_up", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"word": '}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '"oak"}'}}]},
    ):
        assert streamed.add_event({"choices": [{"delta": delta}]})
    assert not streamed.add_event({"choices": [{"delta": {}, "finish_reason": "tool_calls"}]})
    assert first_difference(whole, streamed) is None
    streamed.calls[0][1] += " "
    assert first_difference(whole, streamed) == ("calls", 17, '"oak"})', '"oak"} )', None)


@pytest.mark.slow
def test_page_shows_both_texts_and_escapes_them() -> None:
    comparison, outcomes = asyncio.run(_compared(FakeServer(batch_from=5)))
    outcomes[0].what = "<script>"
    page = as_html(comparison, outcomes, "forebay verify --url 'x'")
    assert "<script>" not in page
    assert page.count('<div class="pair">') == sum(len(outcome.findings.differences) for outcome in outcomes)
    assert "<mark>wrong" in page
    value: Any = json.loads(as_json(comparison, outcomes))
    assert value["verdict"] == verdict_text(outcomes)
    assert len(value["outcomes"]) == len(outcomes)


@contextmanager
def _running(fake: FakeServer) -> Iterator[str]:
    """A fake server in a thread of its own, for a command that has the main one."""
    ready, loop = threading.Event(), asyncio.new_event_loop()
    stopped = asyncio.Event()

    async def serve() -> None:
        async with fake.listening():
            ready.set()
            await stopped.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(HANGS_S)
        yield fake.url
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join(HANGS_S)
        loop.close()


def test_command_compares_two_servers_and_prints_how_to_repeat_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [
        "verify",
        "--budget",
        f"{HANGS_S}s",
        "--max-tokens",
        "6",
        "--only",
        "at http",
        "--html",
        str(tmp_path / "page.html"),
    ]
    with _running(FakeServer()) as one, _running(FakeServer(wrong_without_logprobs=True, gives_logprobs=True)) as other:
        assert forebay([*words, "--url", one, "--url", other]) == 0
    printed = capsys.readouterr().out
    assert f"at {other}" in printed
    assert "--seed=" in printed.splitlines()[-1]
    assert "Does anything around a request" in (tmp_path / "page.html").read_text()


def test_command_compares_the_servers_behind_a_router_with_its_answers(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["verify", "--budget", f"{HANGS_S}s", "--max-tokens", "6", "--only", "at http", "--seed", "1"]
    router = FakeServer(members=[])
    with _running(FakeServer()) as one, _running(FakeServer(models=("other",))) as other, _running(router) as url:
        given = ((one, "both", True), (other, "both", True), (one, "decode", True), (one, "both", False))
        router.members = [{"url": member, "role": role, "up": up} for member, role, up in given]
        assert forebay([*words, "--url", url]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count(f"same at {one}") == 1
    assert f"left out server behind {url}: --model fake: {other} has no model of this name; it lists: other" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--budget", "soon"], "--budget soon is no time"),
        (["--html", "/nowhere/page.html"], "cannot be written"),
        (["--api-key-file", "/nowhere"], "cannot be read"),
        (["--model", "other"], "has no model of this name; it lists: fake"),
        (["--only", "moon"], "no circumstance has this in its name"),
    ],
)
def test_command_refuses_words_that_cannot_work(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with _running(FakeServer()) as url:
        assert forebay(["verify", "--url", url, *words]) == 2
    assert message in capsys.readouterr().err


_BLOCKED = ("torch", "numpy", "tokenizers", "transformers", "safetensors", "starlette", "uvicorn", "jinja2", "pydantic")


def test_comparison_of_a_server_runs_without_torch_and_most_packages() -> None:
    """As in an environment that has httpx2, msgspec and rich alone."""
    code = f"""
import json, sys
sys.modules.update(dict.fromkeys({_BLOCKED!r}))  # importing one raises ImportError
from forebay.cli.commands import run
code = run(sys.argv[1:])
loaded = sorted({{name.partition(".")[0] for name, module in sys.modules.items() if module is not None}})
print(json.dumps(loaded))
sys.exit(code)
"""
    with _running(FakeServer()) as url:
        words = ["verify", "--url", url, "--only=streamed", "--max-tokens=6", f"--budget={HANGS_S}s"]
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "1 of 1 circumstances change no answer" in done.stdout
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert not loaded & {*_BLOCKED}
    assert {"httpx2", "rich"} <= loaded
