"""Conversations as a user keeps them: over reloads, tabs and files, in versions, with any keyboard and screen."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from forebay.requests.sampling_params import SamplingParams
from forebay.text.tokenizer import Tokenizer
from tests.browser.conftest import END, Watch, reload
from tests.browser.test_chat_page import ask
from tests.server.conftest import Running, start
from tests.server.fake_engine import FakeEngine

AXE = (Path(__file__).parent / "vendor" / "axe.min.js").read_text()
RICH = "# Title\n\n|a|b|\n|-|-:|\n|1|2|\n\n```python\nx = 1  # one\n```\n\n\\[x^2\\]\n\n"
RICH += "- [x] [a link](https://e.example/)\n\n> quoted[^1]\n\n[^1]: A *note*."
EMPTY = """() => new Promise((done) => {
    localStorage.clear();
    sessionStorage.clear();
    indexedDB.deleteDatabase("forebay").onsuccess = () => done();
})"""
KEPT = """async (least) => {
    for (;;) {
        const opening = indexedDB.open("forebay");
        const db = await new Promise((done) => (opening.onsuccess = () => done(opening.result)));
        const asked = db.transaction("messages").objectStore("messages").getAll();
        const all = await new Promise((done) => (asked.onsuccess = () => done(asked.result)));
        db.close();
        if (all.filter(({ role, content }) => role === "assistant" && content).length >= least) return;
        await new Promise((done) => setTimeout(done, 20));
    }
}"""

# A transaction that writes stays open, by one request behind the other, until `isSlow` is false.
SLOW_WRITES = """() => {
    window.isSlow = true;
    const begin = IDBDatabase.prototype.transaction;
    IDBDatabase.prototype.transaction = function (names, mode, ...rest) {
        const tx = begin.call(this, names, mode, ...rest);
        const wait = () => window.isSlow && (tx.objectStore(tx.objectStoreNames[0]).count().onsuccess = wait);
        if (mode === "readwrite") wait();
        return tx;
    };
}"""


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer, patience: None) -> Iterator[Running]:
    """Its model says what the last `say ...` of the prompt wants, or something rich."""

    def saying(prompt: list[int], params: SamplingParams) -> list[int]:
        wanted = re.findall(r"say ([\w ]+)", tokenizer.decode(prompt))
        return [*tokenizer.encode(wanted[-1] if wanted else RICH), END]

    running = start(tokenizer, lambda: FakeEngine(saying))
    yield running
    running.close()


@pytest.fixture
def chat(page: Page, watch: Watch, server: Running) -> Page:
    """The page of a browser that has kept nothing."""
    watch.origin = server.url
    page.set_viewport_size({"width": 1200, "height": 800})
    page.goto(f"{server.url}/health")  # of the page's origin, and takes less CPU
    page.evaluate(EMPTY)
    page.goto(server.url)
    return page


@contextmanager
def held(server: Running) -> Iterator[None]:
    """No token comes but by `engine.step`."""
    server.call(setattr, server.engine, "hold", True)
    try:
        yield
    finally:
        server.call(setattr, server.engine, "hold", False)


def answered(page: Page, text: str) -> Locator:
    """Asks, and returns the answer when it is there and kept."""
    ask(page, text)
    answer = page.get_by_role("article", name="Answer").last
    expect(answer.locator(".stats")).to_contain_text("stop")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    return answer


def chats(page: Page) -> Locator:
    return page.get_by_role("navigation", name="Chats").locator(".title")


def act(page: Page, title: str, action: str) -> None:
    chats(page).get_by_text(title, exact=True).hover()
    page.get_by_role("button", name=f"Actions for {title}").click()
    page.get_by_role("button", name=action, exact=True).click()


def test_reload_goes_on_and_a_new_chat_erases_nothing(chat: Page, server: Running) -> None:
    answered(chat, "say first")
    stats = chat.locator(".stats").text_content()
    reload(chat)
    expect(chat.locator(".answer .body")).to_have_text("first")
    expect(chat.locator(".stats")).to_have_text(stats or "none")
    chat.get_by_role("button", name="New chat").click()
    expect(chat.get_by_role("article")).to_have_count(0)
    answered(chat, "say second")
    expect(chats(chat)).to_have_text(["say second", "say first"])
    chat.get_by_role("link", name="say first").click()
    expect(chat.locator(".answer .body")).to_have_text("first")
    answered(chat, "and?")
    assert "say first" in server.tokenizer.decode(server.engine.submitted[-1].prompt)
    expect(chats(chat)).to_have_text(["say first", "say second"])  # the newest first


def test_answer_that_a_reload_cut_is_kept_as_stopped_with_its_figures(chat: Page, server: Running) -> None:
    with held(server):
        ask(chat, "say one two three four five six")
        server.until(lambda: bool(server.engine.running))
        server.call(server.engine.step)
        chat.evaluate(KEPT, 1)
        reload(chat)
        expect(chat.locator(".answer .body")).not_to_be_empty()
        expect(chat.locator(".stats")).to_have_text(re.compile(r"1 token · 1 of \d+ prompt tokens cached.*stopped"))


@pytest.mark.slow
def test_regenerated_answer_that_a_reload_cut_is_the_version_that_is_shown(chat: Page, server: Running) -> None:
    answered(chat, "say again")
    with held(server):
        chat.get_by_role("button", name="Regenerate").last.click()
        server.until(lambda: bool(server.engine.running))
        server.call(server.engine.step)
        chat.evaluate(KEPT, 2)
        reload(chat)
        expect(chat.get_by_label("Version 2 of 2")).to_be_visible()  # the one that was being written


@pytest.mark.slow
def test_undo_leaves_an_answer_that_is_being_written_where_it_is(chat: Page, server: Running) -> None:
    answered(chat, "say red")
    answered(chat, "say green")
    second = chat.get_by_role("article", name="You").last
    second.hover()
    second.get_by_role("button", name="Delete message").click()
    bodies = chat.locator(".answer .body")
    expect(bodies).to_have_text(["red"])
    with held(server):
        chat.get_by_role("button", name="Regenerate").click()
        server.until(lambda: bool(server.engine.running))
        chat.get_by_role("button", name="Undo").click()
        expect(chat.locator("#toast")).to_be_hidden()
        expect(bodies).to_have_attribute("aria-busy", "true")
    expect(bodies).to_have_text(["red"])
    expect(chat.locator(".stats")).to_contain_text("stop")
    chat.get_by_role("button", name="Earlier version").click()
    expect(bodies).to_have_text(["red", "green"])


@pytest.mark.slow
def test_chats_are_searched_by_name_and_text_and_renamed(chat: Page) -> None:
    answered(chat, "say needle")
    chat.get_by_role("button", name="New chat").click()
    answered(chat, "say haystack")
    act(chat, "say haystack", "Rename")
    chat.get_by_label("Name of the chat").fill("Barn")
    chat.keyboard.press("Enter")
    expect(chats(chat)).to_have_text(["Barn", "say needle"])
    for wanted, found in (("bar", ["Barn"]), ("HAYST", ["Barn"]), ("needle", ["say needle"]), ("nowhere", [])):
        chat.get_by_label("Search chats").fill(wanted)
        expect(chats(chat)).to_have_text(found)
    expect(chat.get_by_text("Nothing found.")).to_be_visible()
    reload(chat)
    expect(chats(chat)).to_have_text(["Barn", "say needle"])


@pytest.mark.slow
def test_deleted_chat_comes_back_by_undo_and_is_gone_without(chat: Page) -> None:
    answered(chat, "say keep")
    act(chat, "say keep", "Delete")
    expect(chats(chat)).to_have_count(0)
    expect(chat.get_by_role("article")).to_have_count(0)
    chat.get_by_role("button", name="Undo").click()
    expect(chat.locator(".answer .body")).to_have_text("keep")
    expect(chats(chat)).to_have_text(["say keep"])
    act(chat, "say keep", "Delete")
    chat.get_by_role("button", name="Dismiss").click()
    expect(chat.locator("#toast")).to_be_hidden()
    reload(chat)
    expect(chat.get_by_text("Chats are kept here")).to_be_visible()


def test_edited_messages_and_regenerated_answers_are_versions(chat: Page, server: Running) -> None:
    answered(chat, "say red")
    answered(chat, "say green")
    first = chat.get_by_role("article", name="You").first
    first.hover()
    first.get_by_role("button", name="Edit message").click()
    chat.get_by_label("Edited message").fill("say blue")
    chat.keyboard.press("Enter")
    answer = chat.get_by_role("article", name="Answer")
    expect(answer.locator(".body")).to_have_text(["blue"])
    expect(answer.locator(".stats")).to_contain_text("stop")
    assert "red" not in server.tokenizer.decode(server.engine.submitted[-1].prompt)
    expect(first.get_by_label("Version 2 of 2")).to_be_visible()
    answer.get_by_role("button", name="Regenerate").click()
    expect(answer.get_by_label("Version 2 of 2")).to_be_visible()
    first.get_by_role("button", name="Earlier version").click()
    expect(answer.locator(".body")).to_have_text(["red", "green"])
    reload(chat)
    expect(answer.locator(".body")).to_have_text(["red", "green"])
    first.get_by_role("button", name="Later version").click()
    expect(answer.locator(".body")).to_have_text(["blue"])


@pytest.mark.slow
def test_deleted_message_goes_with_what_follows_and_comes_back(chat: Page) -> None:
    answered(chat, "say red")
    answered(chat, "say green")
    second = chat.get_by_role("article", name="You").last
    second.hover()
    second.get_by_role("button", name="Delete message").click()
    bodies = chat.locator(".answer .body")
    expect(bodies).to_have_text(["red"])
    chat.evaluate(SLOW_WRITES)
    chat.get_by_role("button", name="Undo").click()
    expect(chat.locator("#toast")).to_be_hidden()
    expect(bodies).to_have_text(["red"])  # what a reload would lose is not shown
    chat.evaluate("window.isSlow = false")
    expect(bodies).to_have_text(["red", "green"])
    chat.reload()
    expect(bodies).to_have_text(["red", "green"])


def test_chats_leave_as_files_and_come_back(chat: Page, tmp_path: Path) -> None:
    answered(chat, "say red")
    with chat.expect_download() as markdown:
        act(chat, "say red", "Export as Markdown")
    assert Path(markdown.value.path()).read_text() == "# say red\n\n## You\n\nsay red\n\n## Answer\n\nred\n"
    assert markdown.value.suggested_filename == "say-red.md"
    with chat.expect_download() as whole:
        chat.get_by_role("button", name="Export all").click()
    file = Path(whole.value.path()).read_bytes()
    act(chat, "say red", "Delete")
    chat.get_by_role("button", name="Dismiss").click()
    expect(chats(chat)).to_have_count(0)
    chat.locator("#import-file").set_input_files({"name": "a.json", "mimeType": "application/json", "buffer": file})
    expect(chat.get_by_text("Imported 1 chat.")).to_be_visible()
    chat.get_by_role("link", name="say red").click()
    expect(chat.locator(".answer .body")).to_have_text("red")
    expect(chat.locator(".stats")).to_contain_text("tok/s · stop")
    chat.locator("#import-file").set_input_files({"name": "b.json", "mimeType": "application/json", "buffer": b"[]"})
    expect(chat.get_by_text("b.json: these are no chats of Forebay.")).to_be_visible()


@pytest.mark.slow
def test_undo_of_a_chats_deletion_ends_no_answer(chat: Page, server: Running) -> None:
    answered(chat, "say red")
    chat.get_by_role("button", name="New chat").click()
    answered(chat, "say green")
    act(chat, "say red", "Delete")
    with held(server):
        chat.get_by_role("button", name="Regenerate").click()
        server.until(lambda: bool(server.engine.running))
        chat.get_by_role("button", name="Undo").click()
        expect(chats(chat)).to_have_text(["say green", "say red"])
        expect(chat.locator(".answer .body")).to_have_attribute("aria-busy", "true")
    expect(chat.get_by_label("Version 2 of 2")).to_be_visible()
    expect(chat.locator(".answer .body")).to_have_text("green")
    expect(chat.locator(".stats")).to_contain_text("· stop")


@pytest.mark.slow
def test_file_joins_the_chat_that_is_open_and_writes_over_nothing(chat: Page) -> None:
    answered(chat, "say red")
    answered(chat, "say green")
    with chat.expect_download() as whole:
        chat.get_by_role("button", name="Export all").click()
    file = Path(whole.value.path()).read_bytes().replace(b'"content": "red"', b'"content": "changed"')
    second = chat.get_by_role("article", name="You").last
    second.hover()
    second.get_by_role("button", name="Delete message").click()
    bodies = chat.locator(".answer .body")
    expect(bodies).to_have_text(["red"])
    chat.locator("#import-file").set_input_files({"name": "a.json", "mimeType": "application/json", "buffer": file})
    expect(bodies).to_have_text(["red", "green"])
    reload(chat)
    expect(bodies).to_have_text(["red", "green"])


@pytest.mark.slow
def test_notes_of_an_answer_lead_there_and_back(chat: Page) -> None:
    answer = answered(chat, "Something rich")
    address = chat.url
    expect(answer.locator(".note-mark")).to_have_css("display", "inline")
    mark = answer.get_by_role("link", name="Note 1", exact=True)
    mark.press("Enter")
    expect(answer.locator(".note")).to_be_focused()
    expect(answer.locator(".note")).to_contain_text("A note.")
    chat.keyboard.press("Tab")
    chat.keyboard.press("Enter")
    expect(mark).to_be_focused()
    assert chat.url == address


@pytest.mark.slow
def test_two_tabs_see_each_other_and_lose_nothing(chat: Page, server: Running) -> None:
    answered(chat, "say one")
    other = chat.context.new_page()
    other.goto(chat.url)
    answered(other, "say two")
    bodies = ".answer .body"
    expect(chat.locator(bodies)).to_have_text(["one", "two"])
    with held(server):
        for page, word in ((chat, "left"), (other, "right")):
            ask(page, f"say {word}")
        server.until(lambda: len(server.engine.running) == 2)
    for page, word in ((chat, "left"), (other, "right")):
        expect(page.locator(bodies)).to_have_text(["one", "two", word])
        expect(page.locator(".stats").last).to_contain_text("stop")
    other.close()
    with chat.expect_download() as whole:
        chat.get_by_role("button", name="Export all").click()
    [kept] = json.loads(Path(whole.value.path()).read_bytes())["conversations"]
    answers = [message["content"] for message in kept["messages"] if message["role"] == "assistant"]
    assert sorted(answers) == ["left", "one", "right", "two"]


FORBIDDEN = 'IDBFactory.prototype.open = () => { throw new DOMException("no", "SecurityError"); };'
FULL = """const begin = IDBDatabase.prototype.transaction;
IDBDatabase.prototype.transaction = function (stores, mode) {
    if (mode === "readwrite") throw new DOMException("full", "QuotaExceededError");
    return begin.call(this, stores);
};"""


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize(("script", "said"), [(FORBIDDEN, "keeps nothing"), (FULL, "storage is full")])
def test_page_works_where_the_browser_keeps_nothing_and_says_so(chat: Page, script: str, said: str) -> None:
    chat.add_init_script(script)
    reload(chat)
    answered(chat, "say something")
    expect(chat.locator("#trouble")).to_contain_text(said)
    chat.get_by_role("button", name="New chat").click()
    answered(chat, "say more")
    chat.get_by_role("link", name="say something").click()
    expect(chat.locator(".answer .body")).to_have_text("something")


SAMPLER: dict[str, Any] = {
    "temperature": 0.5, "top_p": 0.75, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1, "presence_penalty": 0.5,
    "frequency_penalty": -0.5, "seed": 11, "min_tokens": 1, "max_tokens": 7,
}  # fmt: skip


@pytest.mark.slow
def test_each_chat_has_its_own_system_prompt_and_sampler(chat: Page) -> None:
    settings = chat.get_by_role("button", name="Settings", exact=True)
    settings.click()
    expect(chat.locator("#temperature")).to_have_attribute("placeholder", "1")  # what the server would take
    expect(chat.locator("#sampling-source")).not_to_be_empty()
    for name, value in SAMPLER.items():
        chat.locator(f"#{name}").fill(str(value))
    chat.get_by_label("System prompt").fill("Be brief.")
    chat.locator("#stop-strings").fill("END\n\\n\\n")
    chat.get_by_text("Tools and structured answers").click()
    chat.get_by_label("Schema").fill('{"type": "object"')
    assert not chat.locator("#schema").evaluate("field => field.validity.valid")
    chat.get_by_label("Schema").fill("")
    chat.get_by_role("button", name="Done").click()
    with chat.expect_request("**/v1/chat/completions") as asked:
        answered(chat, "say a")
    body = json.loads(asked.value.post_data or "")
    assert {name: body[name] for name in SAMPLER} == SAMPLER
    assert body["stop"] == ["END", "\n\n"]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    chat.get_by_role("button", name="New chat").click()
    with chat.expect_request("**/v1/chat/completions") as asked:
        answered(chat, "say b")
    body = json.loads(asked.value.post_data or "")
    assert not {*SAMPLER, "stop"} & {*body}
    assert [message["role"] for message in body["messages"]] == ["user"]
    chat.get_by_role("link", name="say a").click()
    expect(chat.locator("#top_k")).to_have_value("40")


@pytest.mark.slow
def test_message_waits_for_the_answer_and_is_back_in_the_box_where_that_is_stopped(chat: Page, server: Running) -> None:
    with held(server):
        ask(chat, "say one two")
        server.until(lambda: bool(server.engine.running))
        ask(chat, "say next")
        expect(chat.locator("#waiting-message")).to_contain_text("say next")
    bodies = chat.locator(".answer .body")
    expect(bodies).to_have_text(["one two", "next"])
    expect(chat.locator("#waiting-message")).to_be_hidden()
    expect(chat.locator(".stats").last).to_contain_text("stop")
    with held(server):
        ask(chat, "say three four")
        server.until(lambda: bool(server.engine.running))
        ask(chat, "later")
        chat.keyboard.press("Escape")
        expect(chat.get_by_label("Your message")).to_have_value("later")


@pytest.mark.slow
def test_files_of_text_a_long_paste_and_a_link_fill_the_box(chat: Page, server: Running) -> None:
    chat.goto(f"{server.url}/?q=say%20yes")
    expect(chat.get_by_label("Your message")).to_have_value("say yes")
    assert chat.url == f"{server.url}/"
    drop = """files => {
        const data = new DataTransfer();
        for (const [name, bytes] of files) data.items.add(new File([new Uint8Array(bytes)], name));
        document.querySelector("#prompt").dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true }));
    }"""
    chat.evaluate(drop, [["a.txt", list(b"in the ``` file")], ["b.bin", [0, 255, 3]]])
    expect(chat.get_by_text("b.bin is no text.")).to_be_visible()
    chat.evaluate(
        """() => {
            const data = new DataTransfer();
            data.setData("text/plain", "p".repeat(9000));
            document.querySelector("#prompt").dispatchEvent(new ClipboardEvent("paste", { clipboardData: data }));
        }"""
    )
    chips = chat.locator("#files li")
    expect(chips).to_have_text(["a.txt · 15 B", "Pasted text · 8.8 KiB"])
    chat.get_by_role("button", name="Remove Pasted text").click()
    with chat.expect_request("**/v1/chat/completions") as asked:
        chat.get_by_role("button", name="Send").click()
    body = json.loads(asked.value.post_data or "")
    assert body["messages"][0]["content"] == "a.txt:\n````\nin the ``` file\n````\n\nsay yes"
    expect(chat.locator(".prompt summary")).to_have_text("a.txt · 15 B")


@pytest.mark.slow
def test_keyboard_reaches_everything_and_a_sheet_says_how(chat: Page) -> None:
    answered(chat, "say a")
    box = chat.get_by_label("Your message")
    chat.get_by_role("region", name="Conversation").focus()
    chat.keyboard.press("?")
    sheet = chat.get_by_role("dialog", name="Keyboard shortcuts")
    expect(sheet).to_be_visible()
    chat.keyboard.press("Escape")
    expect(sheet).to_be_hidden()
    chat.keyboard.press("/")
    expect(box).to_be_focused()
    box.press("?")
    expect(box).to_have_value("?")
    box.fill("")
    box.press("ArrowUp")
    expect(chat.get_by_label("Edited message")).to_be_focused()
    chat.keyboard.press("Escape")
    chat.keyboard.press("Control+b")
    expect(chat.locator("#panel")).to_be_hidden()
    chat.keyboard.press("Control+k")
    expect(chat.get_by_label("Search chats")).to_be_focused()
    chat.keyboard.press("Control+Shift+O")
    expect(chat.get_by_role("article")).to_have_count(0)
    expect(box).to_be_focused()


@pytest.mark.slow
def test_what_was_pressed_and_is_gone_leaves_the_focus_near(chat: Page) -> None:
    for word in ("red", "green"):
        answered(chat, f"say {word}")
        chat.get_by_role("button", name="New chat").click()
    chat.get_by_role("link", name="say green").click()
    for version in (2, 3):
        chat.get_by_role("button", name="Regenerate").press("Enter")
        expect(chat.get_by_label(f"Version {version} of {version}")).to_be_visible()
    earlier, later = (chat.get_by_role("button", name=f"{which} version") for which in ("Earlier", "Later"))
    earlier.press("Enter")
    expect(chat.get_by_label("Version 2 of 3")).to_be_visible()
    expect(earlier).to_be_focused()
    chat.keyboard.press("Enter")
    expect(chat.get_by_label("Version 1 of 3")).to_be_visible()
    expect(later).to_be_focused()
    chat.get_by_role("button", name="Delete answer").press("Enter")
    expect(chat.get_by_label("Version 2 of 2")).to_be_visible()
    chat.get_by_role("button", name="Undo").press("Enter")
    expect(chat.get_by_label("Version 1 of 3")).to_be_visible()
    expect(chat.get_by_role("region", name="Conversation")).to_be_focused()
    chat.get_by_role("button", name="Actions for say red").press("Enter")
    chat.get_by_role("button", name="Delete", exact=True).press("Enter")
    expect(chats(chat)).to_have_text(["say green"])
    expect(chat.get_by_role("link", name="say green")).to_be_focused()


@pytest.mark.slow
def test_on_a_phone_a_deleted_chat_comes_back_while_the_list_is_open(chat: Page) -> None:
    answered(chat, "say red")
    chat.get_by_role("button", name="New chat").click()
    chat.set_viewport_size({"width": 390, "height": 700})
    chat.get_by_role("button", name="Chats", exact=True).click()
    act(chat, "say red", "Delete")
    expect(chat.locator("#panel")).to_be_visible()
    chat.get_by_role("button", name="Undo").click()
    expect(chat.locator(".answer .body")).to_have_text("red")
    expect(chat.locator("#panel")).to_be_hidden()


def violations(page: Page) -> list[Any]:
    """What axe finds wrong. It is evaluated from outside: the page's own policy would not let it in."""
    page.evaluate(AXE)
    found: list[Any] = page.evaluate(
        "async () => (await axe.run()).violations.map(({ id, nodes }) => [id, nodes.map(({ html }) => html)])"
    )
    return found


@pytest.mark.slow
@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("width", "scheme", "opened"),
    [
        (1200, "light", "Keyboard shortcuts"),
        (1200, "dark", "Settings"),
        (390, "light", "Chats"),
        (390, "dark", "Settings"),
    ],
)
def test_axe_finds_nothing(chat: Page, width: int, scheme: Any, opened: str) -> None:
    chat.emulate_media(color_scheme=scheme)
    chat.set_viewport_size({"width": width, "height": 800})
    answer = answered(chat, "Something rich")
    expect(answer.locator(".katex")).to_be_visible()
    expect(answer.locator(".hljs-number")).to_be_visible()
    expect(chat.get_by_role("heading", level=1)).to_have_text("Forebay")
    assert violations(chat) == []
    chat.get_by_role("button", name=opened, exact=True).click()
    assert violations(chat) == []
    if opened == "Chats":
        chat.keyboard.press("Escape")
        expect(chat.locator("#panel")).to_be_hidden()
        expect(chat.get_by_role("button", name="Chats", exact=True)).to_be_focused()
