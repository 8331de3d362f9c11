"""Settings, keys, and other things a user touches."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Open, Watch
from tests.browser.test_chat_page import ask
from tests.server.fake_engine import FakeEngine


def test_settings_reach_the_request(open_console: Open, page: Page) -> None:
    server = open_console("fine")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_label("Top-p").fill("0.75")
    page.get_by_label("Max tokens").fill("7")
    page.get_by_label("Seed").fill("11")
    page.get_by_role("button", name="Done").click()
    ask(page)
    expect(page.locator(".stats")).to_contain_text("stop")
    params = server.engine.submitted[0].params
    assert (params.temperature, params.top_p, params.max_tokens, params.seed) == (0.5, 0.75, 7, 11)
    assert "Be brief." in server.tokenizer.decode(server.engine.submitted[0].prompt)
    page.reload()
    expect(page.locator("#temperature")).to_have_value("0.5")
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Defaults").click()
    expect(page.locator("#temperature")).to_have_value("")


@pytest.mark.slow
def test_conversation_is_sent_and_a_regenerated_answer_stands_where_the_old_one_did(
    open_console: Open, page: Page
) -> None:
    server = open_console("marvellous")
    for prompt in ("first question", "second question"):
        ask(page, prompt)
        expect(page.locator(".stats").last).to_contain_text("stop")
    second = server.tokenizer.decode(server.engine.submitted[1].prompt)
    assert all(part in second for part in ("first question", "marvellous", "second question"))
    page.get_by_role("button", name="Regenerate").last.click()
    server.until(lambda: len(server.engine.submitted) == 3)
    assert server.engine.submitted[2].prompt == server.engine.submitted[1].prompt
    expect(page.get_by_role("article", name="Answer")).to_have_count(2)
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_role("article")).to_have_count(0)
    expect(page.get_by_text("Ask the model something.")).to_be_visible()


@pytest.mark.slow
def test_copy_takes_the_answer_as_it_was_written(open_console: Open, page: Page) -> None:
    server = open_console("some **bold** words")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=server.url)
    ask(page)
    expect(page.locator(".stats")).to_contain_text("stop")
    page.evaluate("() => (window.setTimeout = () => 0)")  # what the button says stays
    page.get_by_role("button", name="Copy answer").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "some **bold** words"


def test_key_is_asked_for_used_and_kept_for_the_tab_only(open_console: Open, page: Page, watch: Watch) -> None:
    watch.expected = ("401",)
    open_console("hello there", api_keys=("correct horse",))
    field = page.get_by_label("This server wants an API key")
    expect(field).to_be_focused()
    field.fill("battery staple")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("The server does not take that key.")
    expect(field).to_be_focused()
    field.fill("correct horse")
    page.keyboard.press("Enter")
    expect(page.locator("#ready")).to_have_text("ready")
    ask(page)
    expect(page.locator(".answer .body")).to_have_text("hello there")
    assert page.evaluate("JSON.stringify(localStorage)").count("correct horse") == 0
    assert page.evaluate("sessionStorage.length") == 1


@pytest.mark.slow
def test_nothing_overflows_sideways(open_console: Open, page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 700})
    open_console(f"{'x' * 130}\n\n```\n{'y' * 150}\n```\n\n|{'wide |' * 9}\n|{'---|' * 9}\n|{'z |' * 9}")
    ask(page, "w" * 500)
    expect(page.locator(".stats")).to_contain_text("stop")
    for width in (360, 768, 1200):
        page.set_viewport_size({"width": width, "height": 700})
        assert page.evaluate("[innerWidth, document.documentElement.scrollWidth <= innerWidth]") == [width, True]


@pytest.mark.slow
def test_state_of_the_server_stays_clear_of_the_buttons_on_the_narrowest_screen(
    open_console: Open, page: Page, watch: Watch
) -> None:
    watch.expected = ("503",)
    page.set_viewport_size({"width": 320, "height": 600})
    open_console(make_engine=lambda: FakeEngine(max_running=0, max_queued=0))
    ready, button = page.locator("#ready"), page.locator("#new-chat")
    expect(ready).to_have_text("full")
    ready.evaluate("ready => (ready.textContent = 'not ready as far as we know')")
    right = ready.evaluate("node => node.getBoundingClientRect().right")
    assert right <= button.evaluate("node => node.getBoundingClientRect().left")


@pytest.mark.slow
def test_wide_table_scrolls_and_breaks_no_words(open_console: Open, page: Page) -> None:
    open_console(f"|{'longer |' * 16}\n|{'-|' * 16}\n|{'words |' * 16}")
    ask(page)
    expect(page.locator(".stats")).to_contain_text("stop")
    assert page.locator(".table").evaluate("box => box.scrollWidth > box.clientWidth")
    heights = page.locator("th").evaluate_all("cells => cells.map((cell) => cell.offsetHeight)")
    assert max(heights) < 2 * 24


RTL = "- ראשון\n  - שני\n\n> שלישי\n\n|א|ב|\n|-|-|\n|1|2|\n"


@pytest.mark.slow
def test_what_is_written_from_the_right_begins_there(open_console: Open, page: Page) -> None:
    open_console(RTL)
    ask(page, "שלום")
    expect(page.locator(".answer .stats")).to_contain_text("stop")
    body = page.locator(".answer .body")
    item, quote, column = body.locator("li").first, body.locator("blockquote"), body.locator("th").first
    margin = "node => parseFloat(getComputedStyle(node).marginRight)"
    assert item.evaluate(margin) > 0  # where its mark stands
    expect(quote).to_have_css("border-right-width", "3px")
    right = "node => node.getBoundingClientRect().right"
    assert column.evaluate(right) == body.evaluate(right)
    for depth, mark in ((0, "disc"), (1, "circle")):
        expect(body.locator("ul").nth(depth)).to_have_css("list-style-type", mark)


@pytest.mark.slow
def test_what_closes_the_settings_is_in_sight_and_one_line(open_console: Open, page: Page) -> None:
    open_console()
    page.get_by_role("button", name="Settings", exact=True).click()
    done = page.get_by_role("button", name="Done")
    for width in (390, 1200):
        page.set_viewport_size({"width": width, "height": 600})
        expect(done).to_be_in_viewport(ratio=1)
        assert done.evaluate("button => button.offsetHeight < 2 * parseFloat(getComputedStyle(button).lineHeight)")


@pytest.mark.slow
def test_box_is_as_wide_as_the_text_above_it(open_console: Open, page: Page) -> None:
    open_console()
    expect(page.locator("#ready")).to_have_text("ready")
    sides = "box => [box.getBoundingClientRect().left, box.getBoundingClientRect().right]"
    for width in (390, 1200, 1700):
        page.set_viewport_size({"width": width, "height": 700})
        assert page.locator("#composer").evaluate(sides) == page.locator("#welcome").evaluate(sides), width


GROW = """async (sizes) => {
    const scroller = document.querySelector("#conversation");
    const last = document.querySelector("#turns").lastElementChild;
    for (const size of sizes) {
        last.style.paddingBottom = `${size}px`;
        await new Promise(requestAnimationFrame);
        await new Promise((done) => setTimeout(done)); // behind the frame, before scrolling in it is told of
    }
    for (let i = 0; i < 3; i++) await new Promise(requestAnimationFrame);
    return scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight;
}"""


@pytest.mark.slow
def test_page_follows_the_answer_only_if_scrolled_to_its_end(open_console: Open, page: Page) -> None:
    open_console("fine")
    ask(page)
    expect(page.locator(".stats")).to_contain_text("stop")
    assert page.evaluate(GROW, [2000, 4000]) < 1
    page.locator("#conversation").hover()
    page.mouse.wheel(0, -500)
    expect(page.locator(".answer .stats")).not_to_be_in_viewport()
    assert page.evaluate(GROW, [6000]) > 2000


@pytest.mark.slow
def test_server_that_comes_back_with_another_model_is_asked_for_that_one(
    open_console: Open, page: Page, watch: Watch
) -> None:
    watch.expected = ("404",)
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [{"id": "before"}]}), times=1)
    open_console("Here I am.")
    expect(page.locator("#model")).to_have_text("before")
    page.get_by_role("button", name="Engine", exact=True).click()
    ask(page)
    expect(page.get_by_role("alert")).to_contain_text("the model 'before' is not served here")
    expect(page.locator("#model")).to_have_text("tiny")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".answer .body")).to_have_text("Here I am.")


@pytest.mark.slow
def test_lost_server_is_shown_if_the_strip_is_closed(open_console: Open, page: Page, watch: Watch) -> None:
    watch.expected = ("ERR_INTERNET_DISCONNECTED",)
    open_console("Here I am.")
    expect(page.locator("#ready")).to_have_text("ready")
    page.get_by_role("button", name="Engine", exact=True).click()
    page.wait_for_load_state("networkidle")
    page.context.set_offline(True)
    try:
        ask(page)
        expect(page.get_by_role("alert")).to_contain_text("cannot be reached")
        expect(page.locator("#ready")).to_have_text("offline")
    finally:
        page.context.set_offline(False)
    expect(page.locator("#ready")).to_have_text("ready")


@pytest.mark.slow
def test_answer_that_never_ends_can_be_left_by_a_new_chat(open_console: Open, page: Page) -> None:
    server = open_console(make_engine=lambda: FakeEngine(manual=True))
    ask(page)
    server.until(lambda: bool(server.engine.running))
    page.get_by_role("button", name="New chat").click()
    server.until(lambda: server.engine.aborted == [1])
    expect(page.get_by_role("button", name="Send")).to_be_visible()
