"""The strip: what the engine does and keeps, as a user looks at it."""

from __future__ import annotations

import re

import msgspec
import pytest
from playwright.sync_api import Page, expect

from forebay.engine.frames import Occupied, ReuseReport, State
from forebay.memory.ghosts import Reuse
from forebay.memory.radix_node import Branch
from forebay.requests.updates import CacheReport, MemoryReport, MissReason
from tests.browser.conftest import ENDING, Open, Watch
from tests.browser.test_chat_page import ask, begin
from tests.server.fake_engine import FakeEngine

HIDE = """hidden => {
    Object.defineProperty(document, "hidden", {value: hidden, configurable: true});
    document.dispatchEvent(new Event("visibilitychange"));
}"""


class LivelyEngine(FakeEngine):
    """Counts its tokens as the scheduler does, and can sleep."""

    memory_now = Occupied(num_bytes={"kv_cache": 3 << 20})

    async def state(self) -> State:
        state = await super().state()
        sent = float(sum(stream.sent for stream in self.submitted))
        counters = {**state.counters, "generated_tokens": sent}
        self.last_state = msgspec.structs.replace(state, counters=counters, memory=self.memory_now)
        return self.last_state

    async def resume(self, tags: object = ()) -> State:
        asleep = self.memory_now.phase == "serving"
        self.memory_now = Occupied(
            phase="asleep" if asleep else "serving",
            released=["kv_cache"] if asleep else [],
            num_bytes={"kv_cache": 3 << 20},
        )
        return await self.state()

    sleep = wake_up = resume


def name(number: int) -> bytes:
    return number.to_bytes(8, "big")


def branch(number: int, parent: int, num_pages: int, **more: object) -> Branch:
    told = {"namespace": "", "author": "nobody", "locks": 0, "hits": 3, "idle_s": 200.0, "kept": [1], "tokens": b""}
    return Branch(name=name(number), parent=name(parent), num_pages=num_pages, **{**told, **more})


def test_pools_show_owners_with_descriptions(open_console: Open, page: Page) -> None:
    def with_bytes() -> FakeEngine:
        engine = FakeEngine(manual=True)
        engine.info = msgspec.structs.replace(engine.info, slot_bytes={"kv": 16 * 23040})
        return engine

    open_console(make_engine=with_bytes)
    ask(page)
    expect(page.locator("#running")).to_have_text("1")
    expect(page.get_by_role("img", name="KV pages: 1 running, 96 cached, 0 quarantined, 3,999 free")).to_be_visible()
    expect(page.get_by_role("img", name="request rows: 1 running")).to_be_visible()
    pool = page.get_by_role("group", name="KV pages")
    expect(pool.locator("h3 span")).to_have_text("34.1 MiB of 1.4 GiB")
    expect(pool.locator(".words")).to_be_hidden()
    pool.focus()
    expect(pool.locator(".words")).to_have_text(
        "4,096 pages of 16 tokens, 22.5 KiB a token; 1 in use by running requests, 96 by the cache, 3,999 free."
    )
    expect(pool.locator(".words")).to_be_visible()
    page.get_by_label("Your message").focus()
    page.keyboard.press("Escape")
    expect(page.locator("#running")).to_have_text("0")


@pytest.mark.slow
def test_figures_go_with_the_server_and_come_back_with_it(open_console: Open, page: Page, watch: Watch) -> None:
    server = open_console(make_engine=lambda: LivelyEngine(interval_s=0.01))
    server.engine.counters = {
        "prompt_tokens": 400.0,
        "cached_tokens": 300.0,
        "misses.diverged": 2.0,
        "misses.none": 5.0,
    }
    expect(page.locator("#rate")).to_have_text("0.0")
    expect(page.get_by_role("heading", name="Prompts 75 % reused")).to_be_visible()
    expect(page.locator("#misses li")).to_have_text(["all reused5", "differs from what was cached2"])
    ask(page)
    expect(page.locator(".chart.speed path")).to_have_attribute("d", re.compile("M"))
    watch.expected = (*ENDING, "ERR_INTERNET_DISCONNECTED")
    page.context.set_offline(True)
    try:
        expect(page.locator("#ready")).to_have_text("offline")
        for figure in ("#running", "#waiting", "#rate"):
            expect(page.locator(figure)).to_have_text("–")
        expect(page.locator("#strip")).to_have_class(re.compile("stale"))
    finally:
        page.context.set_offline(False)
    for stream in server.engine.submitted:
        server.call(stream.abort)
    server.engine.counters, server.engine.submitted = {}, []  # another has begun
    page.evaluate(HIDE, False)  # rather than wait for the next try
    expect(page.locator("#ready")).to_have_text("ready")
    expect(page.locator("#running")).to_have_text("0")
    expect(page.locator("#rate")).to_have_text("0.0")
    expect(page.locator("#strip")).not_to_have_class(re.compile("stale"))


@pytest.mark.slow
def test_nobody_is_asked_while_nobody_looks(open_console: Open, page: Page) -> None:
    open_console()
    expect(page.locator("#running")).to_have_text("0")
    toggle = page.get_by_role("button", name="Engine", exact=True)
    toggle.click()
    expect(page.locator("#strip")).to_be_hidden()
    page.wait_for_load_state("networkidle")
    polls: list[str] = []
    page.on("request", lambda request: polls.append(request.url))
    page.wait_for_timeout(1300)  # longer than a polling interval: the absence of a poll is the point
    assert polls == []
    with page.expect_request("**/debug/state"):
        toggle.click()
    page.evaluate(HIDE, True)
    page.wait_for_load_state("networkidle")
    polls.clear()
    page.wait_for_timeout(1300)
    assert polls == []
    with page.expect_request("**/debug/state"):
        page.evaluate(HIDE, False)


def test_the_band_draws_each_answer_and_says_where_its_prompt_left_the_cache(open_console: Open, page: Page) -> None:
    server = open_console("forty-two")
    expect(page.locator("#band-note")).to_contain_text("Ask something")
    (here,), (there,) = server.tokenizer.encode(" world"), server.tokenizer.encode("hello")
    server.engine.cache = CacheReport(16, MissReason.DIVERGED, 16, differs_at=17, token_here=here, token_there=there)
    server.engine.memory = MemoryReport(1, 9, [16, 24])
    ask(page)
    note = page.locator("#band-note")
    expect(note).to_contain_text("Answer 1: 16 reused, ")
    expect(note).to_contain_text(" generated, 9 computed again after 1 retraction, 2 checkpoints. ")
    expect(note).to_contain_text(re.compile(r"Left the cache at token 17 of \d+: the text differs here from what was"))
    expect(note).to_contain_text("cached: “ world”, where “hello” stood.")
    parts = page.locator("#band svg.band > rect").evaluate_all("parts => parts.map((part) => part.dataset.part)")
    assert parts == ["reused", "computed", "generated", "again", "checkpoints", "checkpoints"]
    server.engine.cache, server.engine.memory = CacheReport(0, MissReason.EMPTY), None
    ask(page, "again")
    expect(note).to_contain_text("Nothing was reused: nothing in the cache begins like this.")
    rows = page.locator("#band button")
    expect(rows).to_have_count(2)
    rows.first.focus()
    expect(note).to_contain_text("Answer 1: 16 reused")
    expect(rows.first).to_have_attribute("aria-pressed", "true")
    page.get_by_role("button", name="New chat").click()
    expect(rows).to_have_count(0)


@pytest.mark.slow
def test_the_band_grows_with_the_answer_and_leaves_alone_what_is_looked_at(open_console: Open, page: Page) -> None:
    server, _ = begin(open_console, page)
    note, row = page.locator("#band-note"), page.locator("#band button")

    def grow_to(pattern: str) -> None:
        """It is drawn from time to time."""
        while not re.search(pattern, note.text_content() or ""):
            server.call(server.engine.step)
            page.wait_for_timeout(20)

    grow_to(r"Answer 1: .* computed, \d+ generated")
    row.evaluate("row => { row.isTheSame = true; row.focus(); }")
    grow_to(r" \d\d+ generated")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    expect(row).to_be_focused()
    assert row.evaluate("row => row.isTheSame")
    page.keyboard.press("Escape")


def test_each_reason_is_said_in_words(open_console: Open, page: Page) -> None:
    open_console()
    said = page.evaluate(
        """async (reasons) => {
            const { leaving } = await import("/console/band.js");
            const { missList } = await import("/console/charts.js");
            const cache = (miss_reason) => ({ cached_tokens: 16, miss_reason });
            const said = (reason) => leaving({ prompt_tokens: 90, completion_tokens: 1, cache: cache(reason) });
            const counters = Object.fromEntries(reasons.map((reason) => [`misses.${reason}`, 1]));
            return [...reasons.map(said), ...missList(counters).map((row) => row.textContent)];
        }""",
        list(MissReason),
    )
    assert len(said) == 2 * len(MissReason)
    assert [words for words in said if "_" in words or not words] == []


@pytest.mark.slow
def test_more_memory_is_shown_with_what_it_would_bring(open_console: Open, page: Page) -> None:
    found = {"": Reuse(1000, 610, {"device": [600, 770, 800]})}  # of clients without a name
    open_console("fine").engine.reuse_report = ReuseReport(0, {"device": 8 << 30}, found)
    page.locator("#branches > summary").click()
    expect(page.locator("#what-if > li")).to_have_text(
        [
            "+8 GiB: 61 to 78 % of prompt tokens reused",
            "+24 GiB: 61 to 81 % of prompt tokens reused",
        ]
    )


def test_ten_thousand_branches_are_shown_largest_first_and_a_few_at_a_time(open_console: Open, page: Page) -> None:
    server = open_console("fine")
    engine = server.engine
    engine.info = msgspec.structs.replace(engine.info, slot_bytes={"kv": 1024, "state": 2048})
    ask(page)
    expect(page.locator(".stats")).to_contain_text("stop")
    text = server.tokenizer.encode("hello world")
    tokens = b"".join(token.to_bytes(4, "little") for token in text)
    engine.kinds = ["state"]
    root = Branch(name(1), b"", "0/" + engine.namespaces[0], "", 0, 1, 0, 0.0, [0], b"")
    engine.branches = [
        root,
        *(branch(i, 1, 1) for i in range(100, 10_000)),
        branch(50, 1, 500, author=engine.authors[0], tokens=tokens, locks=1, kept=[0]),
        *(branch(i, 50, i) for i in range(10, 50)),
        branch(51, 50, 2, locks=2),
    ]
    page.get_by_text("Prefix cache", exact=True).click()
    expect(page.locator("#branch-note")).to_have_text("9,942 branches, 30.7 MiB.")
    rows = page.locator("#branch-rows > .level > .branches > li")
    expect(rows).to_have_count(25)
    first = rows.first.get_by_role("button").first
    expect(first).to_contain_text("hello world")
    expect(rows.nth(1)).to_contain_text("another session’s")
    first.focus()
    page.keyboard.press("Enter")
    expect(first).to_have_attribute("aria-expanded", "true")
    facts = rows.first.locator(".details > .caption").first
    expect(facts).to_contain_text("8,000 tokens here, 26,912 with the 41 branches below")
    expect(facts).to_contain_text("used 3 times, last 3 min ago; 41 states; held by 2 running requests")
    below = rows.first.locator(".branches > li")
    expect(below).to_have_count(25)
    rows.first.get_by_role("button", name="16 more, smaller ones").click()
    expect(below).to_have_count(41)
    expect(first).to_be_visible()
    page.get_by_role("button", name="9,876 more").click()
    expect(rows).to_have_count(50)


def test_settings_can_be_searched_with_their_reasons(open_console: Open, page: Page) -> None:
    open_console()
    page.get_by_text("Settings in force").click()
    rows = page.locator("#effective-rows > div")
    expect(rows).to_have_text(["page size16the default", "kv1 GiB65536 tokens x 16 KiB"])
    page.get_by_label("Search settings").fill("page")
    expect(rows.last).to_be_hidden()
    expect(page.locator("#effective-note")).to_have_text("1 of 2")


def test_who_may_puts_the_engine_to_sleep_and_wakes_it(open_console: Open, page: Page, watch: Watch) -> None:
    watch.expected = ("503",)
    open_console(make_engine=LivelyEngine)
    page.get_by_role("button", name="Put the engine to sleep").click()
    expect(page.locator("#strip-note")).to_have_text("The engine is asleep: KV cache released, 3 MiB.")
    page.reload()
    expect(page.locator("#ready")).to_have_text("asleep")
    expect(page.locator("#model")).to_have_text("tiny")
    expect(page.locator("#strip-note")).to_have_text("The engine is asleep: KV cache released, 3 MiB.")
    page.get_by_role("button", name="Wake the engine").click()
    expect(page.get_by_role("button", name="Put the engine to sleep")).to_be_visible()
    expect(page.locator("#strip-note")).to_be_empty()


@pytest.mark.slow
def test_who_may_not_administer_is_offered_nothing(open_console: Open, page: Page, watch: Watch) -> None:
    watch.expected = ("401",)
    open_console(make_engine=LivelyEngine, api_keys=("correct horse",))
    page.get_by_label("This server wants an API key").fill("correct horse")
    page.keyboard.press("Enter")
    expect(page.locator("#running")).to_have_text("0")
    expect(page.locator("#sleep")).to_be_hidden()


@pytest.mark.slow
def test_on_a_phone_the_strip_is_a_drawer_of_its_own(open_console: Open, page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 700})
    open_console(make_engine=lambda: FakeEngine(manual=True))
    expect(page.locator("#ready")).to_have_text("ready")
    expect(page.locator("#strip")).to_be_hidden()
    ask(page)
    page.get_by_role("button", name="Engine", exact=True).click()
    expect(page.locator("#running")).to_have_text("1")
    expect(page.get_by_role("button", name="Close the engine’s strip")).to_be_focused()
    expect(page.locator("main")).to_have_attribute("inert", "")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.keyboard.press("Escape")
    expect(page.locator("#strip")).to_be_hidden()
    expect(page.get_by_role("button", name="Engine", exact=True)).to_be_focused()
    expect(page.get_by_role("button", name="Stop")).to_be_visible()  # it closes one thing at a time
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
