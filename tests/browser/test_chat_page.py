"""The page as a user meets it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from playwright.sync_api import Locator, Page, Route, expect

from forebay.text.answers.probes import Findings
from forebay.text.answers.reading import AnswerFormats
from tests.browser.conftest import ENDING, Open, Watch
from tests.server.conftest import MODEL, Running
from tests.server.fake_engine import FakeEngine

HOSTILE = """Before <img src=x onerror="window.hacked=1"> and <script>window.hacked=1</script>

<svg onload="window.hacked=1"></svg><iframe src="javascript:parent.hacked=1"></iframe>

[click](javascript:window.hacked=1) [data](data:text/html,<script>1</script>) ![pixel](https://example.invalid/pixel.png)

```html"><img src=x onerror=window.hacked=1>
<script>window.hacked=1</script>
```

| <b onmouseover=hacked=1>a</b> | b |
|---|---|
| <style>body{display:none}</style> | <form action=//example.invalid><input></form> |
"""


def begin(open_console: Open, page: Page) -> tuple[Running, Locator]:
    """An answer of which two tokens have come and no more will: (server, the answer's article)."""
    server = open_console(make_engine=lambda: FakeEngine(lambda *_: [1000] * 400, manual=True))
    ask(page)
    server.until(lambda: bool(server.engine.running))
    answer = page.get_by_role("article", name="Answer")
    for count in (1, 2):  # one after the other: of what comes at once there is no rate
        server.call(server.engine.step)
        expect(answer.locator(".body")).to_have_text(server.tokenizer.decode([1000] * count))
    return server, answer


def ask(page: Page, text: str = "Hello") -> None:
    page.get_by_label("Your message").fill(text)
    page.keyboard.press("Enter")


@pytest.mark.slow
def test_a_prompt_sent_before_the_models_name_has_come_is_answered(
    open_console: Open, page: Page, watch: Watch
) -> None:
    lost: list[str] = []

    def lose_the_first(route: Route) -> None:
        if lost:
            route.continue_()
        else:
            lost.append(route.request.url)
            route.abort()

    watch.expected = ("ERR_FAILED",)
    page.route("**/v1/models", lose_the_first)
    open_console("Here I am.")
    expect(page.locator("#ready")).to_have_text("ready")
    ask(page)
    expect(page.locator(".stats")).to_contain_text("stop")


def test_prompt_is_answered_in_a_stream_with_a_line_of_figures(open_console: Open, page: Page) -> None:
    open_console("The answer is **forty-two**, and it took a while to find.", interval_s=0.005)
    expect(page.locator("#ready")).to_have_text("ready")
    expect(page.locator("#model")).to_have_text("tiny")
    ask(page, "What is the answer?")
    answer = page.get_by_role("article", name="Answer")
    expect(answer.locator(".body")).to_have_text("The answer is forty-two, and it took a while to find.")
    expect(answer.locator("strong")).to_have_text("forty-two")
    expect(answer.locator(".stats")).to_have_text(
        re.compile(
            r"\d+ tokens · 1 of \d+ prompt tokens cached, the rest is new · first token .+ m?s · .+ tok/s · stop"
        )
    )
    answer.get_by_text("Explain", exact=True).click()
    expect(answer.locator(".why li")).to_have_count(6)
    expect(answer.locator(".why")).to_contain_text("waited 0 ms for its turn")
    expect(answer.locator(".why")).to_contain_text("would help: send the same beginning again: it is cached now")


@pytest.mark.slow
def test_text_shows_while_it_is_still_being_written(open_console: Open, page: Page) -> None:
    server = open_console(make_engine=lambda: FakeEngine(manual=True))
    ask(page)
    server.until(lambda: bool(server.engine.running))
    server.call(server.engine.step)
    body = page.get_by_role("article", name="Answer").locator(".body")
    expect(body).not_to_be_empty()
    expect(body).to_have_attribute("aria-busy", "true")
    server.call(server.engine.running[1].end, "stop")
    expect(body).to_have_attribute("aria-busy", "false")


@pytest.mark.quick(1)
@pytest.mark.parametrize("how", ["button", "escape"])
def test_stop_ends_the_request_and_keeps_the_text(open_console: Open, page: Page, how: str) -> None:
    server, answer = begin(open_console, page)
    if how == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    expect(answer.locator(".stats")).to_have_text(
        re.compile(r"^\d+ tokens? · 1 of \d+ prompt tokens cached.+tok/s · stopped")
    )
    expect(answer.locator(".body")).not_to_be_empty()
    server.until(lambda: server.engine.aborted == [1])
    expect(page.get_by_label("Your message")).to_be_focused()


def test_hostile_output_is_inert(open_console: Open, page: Page) -> None:
    open_console(HOSTILE, interval_s=0.001)  # most of its beginnings are shown, too
    ask(page)
    answer = page.get_by_role("article", name="Answer")
    expect(answer.locator(".stats")).to_contain_text("stop")
    expect(answer.locator(".body")).to_contain_text('<img src=x onerror="window.hacked=1">')
    assert page.evaluate("window.hacked") is None
    assert (
        answer.locator(".body")
        .locator("img, script, svg, iframe, style, form, input, [onerror], [onmouseover]")
        .count()
        == 0
    )
    links = answer.locator("a").evaluate_all("links => links.map((link) => link.getAttribute('href'))")
    assert [link for link in links if not link.startswith("https://")] == []


@pytest.mark.slow
def test_server_error_is_shown_in_its_own_words(open_console: Open, page: Page, watch: Watch) -> None:
    watch.expected = ("429", "503")  # Chromium logs every failed request; a full server is not ready
    open_console(make_engine=lambda: FakeEngine(max_running=0, max_queued=0))
    ask(page)
    expect(page.get_by_role("alert")).to_contain_text("requests")
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible()


def test_error_in_the_middle_of_an_answer_keeps_what_was_said(open_console: Open, page: Page, watch: Watch) -> None:
    watch.expected = ENDING  # the page asks for /ready
    server, answer = begin(open_console, page)
    server.call(server.engine.die)
    expect(page.get_by_role("alert")).to_contain_text("the engine died")
    expect(answer.locator(".body")).not_to_be_empty()


@pytest.mark.long
def test_thinking_is_folded_and_calls_wait_for_results(open_console: Open, page: Page) -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "<b>x</b>"}}\n</tool_call>'
    formats = AnswerFormats("hermes", "think")
    server = open_console(
        f"<think>Let me *look*.</think>A moment.{call}", model=replace(MODEL, answers=Findings(formats=formats))
    )
    page.get_by_role("button", name="Settings").click()
    page.get_by_text("Tools and structured answers").click()
    page.get_by_label("Tools").fill('[{"type": "function", "function": {"name": "look"}}]')
    page.get_by_role("button", name="Done").click()
    ask(page)
    answer = page.get_by_role("article", name="Answer").first
    expect(answer.locator(".stats")).to_contain_text("tool_calls")
    expect(answer.locator(".thought summary")).to_have_text(re.compile(r"Thought for [\d.]+ m?s"))
    expect(answer.get_by_text("Let me *look*.")).to_be_hidden()
    answer.locator(".thought summary").click()
    expect(answer.get_by_text("Let me *look*.")).to_be_visible()
    expect(answer.get_by_text("A moment.", exact=True)).to_be_visible()
    expect(page.get_by_label("Call of look").locator("code")).to_have_text('{"at": "<b>x</b>"}')
    page.get_by_label("Result of look").fill("a river")
    page.get_by_role("button", name="Send results").click()
    server.until(lambda: len(server.engine.submitted) == 2)
    prompt = server.tokenizer.decode(server.engine.submitted[1].prompt)
    assert '{"name": "look", "arguments": {"at": "<b>x</b>"}}' in prompt
    assert "<tool_response>\na river\n</tool_response>" in prompt
