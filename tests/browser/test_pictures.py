"""Pictures that a user drops, pastes or chooses, on their way into a request and back after a reload."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, Route, expect

from tests.browser.conftest import Open, reload
from tests.browser.test_chat_page import ask
from tests.browser.test_conversations import act, chats, violations
from tests.browser.test_page_modules import modules
from tests.server.conftest import shared

__all__ = ["modules", "shared"]  # fixtures

STREAM = 'data: {"choices": [{"delta": {"content": "A square."}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
GIVE = """([how, files, texts]) => {
    const data = new DataTransfer();
    for (const [name, type, bytes] of files) data.items.add(new File([new Uint8Array(bytes)], name, { type }));
    for (const [type, text] of Object.entries(texts)) data.setData(type, text);
    const event = how === "drop"
        ? new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true })
        : new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true });
    return document.querySelector("#prompt").dispatchEvent(event);
}"""
GIVE_AND_SEND = f"given => {{ ({GIVE})(given); document.querySelector('#composer').requestSubmit(); }}"
LOADED = "images => images.map(({ alt, complete, naturalWidth }) => [alt, complete && naturalWidth])"
NO_ROOM = """const { put } = IDBObjectStore.prototype;
IDBObjectStore.prototype.put = function (value) {
    if (value.pictures?.some(({ url }) => url)) throw new DOMException("full", "QuotaExceededError");
    return put.call(this, value);
};
null"""

File = tuple[str, str, bytes]


def png(width: int, height: int = 2) -> bytes:
    """Return a grey picture."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    rows = zlib.compress(b"\0" * height * (width + 1))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def picture(name: str, width: int) -> File:
    return name, "image/png", png(width)


def url_of(width: int) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(width)).decode()}"


def give(page: Page, how: str, *files: File, then_send: bool = False, **texts: str) -> bool:
    """Drop or paste; return whether the browser does with it what it does by itself. The message may be sent at once,
    before the files are read."""
    by_type = {f"text/{kind}": text for kind, text in texts.items()}
    passed: bool = page.evaluate(
        GIVE_AND_SEND if then_send else GIVE, [how, [[name, kind, list(body)] for name, kind, body in files], by_type]
    )
    return passed


def images(place: Locator | Page) -> Locator:
    return place.locator("img.image")


@pytest.fixture
def sent(page: Page) -> list[Any]:
    """Bodies of the requests for an answer, which is the same for all."""
    bodies: list[Any] = []

    def answer(route: Route) -> None:
        bodies.append(json.loads(route.request.post_data or ""))
        route.fulfill(body=STREAM, content_type="text/event-stream")

    page.route("**/v1/chat/completions", answer)
    return bodies


def open_for_pictures(open_console: Open, page: Page) -> None:
    """Open the page of a server whose model takes images, in a browser that has kept nothing."""

    def inform(route: Route) -> None:
        response = route.fetch()
        route.fulfill(response=response, json={**response.json(), "accepts_images": True})

    page.route("**/server_info", inform)
    open_console()
    expect(page.get_by_label("Add pictures or files of text")).to_be_attached()


def test_pictures_dropped_pasted_or_chosen_are_sent_and_shown_after_a_reload(
    open_console: Open, page: Page, sent: list[Any], tmp_path: Path
) -> None:
    open_for_pictures(open_console, page)
    give(page, "drop", picture("a.png", 3), picture("gone.png", 4))
    assert not give(page, "paste", picture("image.png", 5))
    chosen = {"name": "b.png", "mimeType": "image/png", "buffer": png(6)}
    page.get_by_label("Add pictures or files of text").set_input_files(chosen)  # type: ignore[arg-type]
    thumbnails = images(page.locator("#files"))
    expect(thumbnails).to_have_count(4)
    assert violations(page) == []
    page.get_by_role("button", name="Remove gone.png").press("Enter")
    expect(page.get_by_label("Your message")).to_be_focused()
    ask(page, "What is it?")
    shown = images(page.get_by_role("article", name="You"))
    expect(page.locator(".answer .body")).to_have_text("A square.")
    expect(thumbnails).to_have_count(0)
    parts = [{"type": "image_url", "image_url": {"url": url_of(width)}} for width in (3, 5, 6)]
    assert sent[0]["messages"] == [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]
    reload(page)
    expect(shown).to_have_count(3)
    assert shown.evaluate_all(LOADED) == [["a.png", 3], ["image.png", 5], ["b.png", 6]]
    assert violations(page) == []
    page.get_by_role("article", name="You").get_by_role("button", name="Edit message").click()
    page.get_by_label("Edited message").fill("And this?")
    page.keyboard.press("Enter")
    expect(page.get_by_label("Version 2 of 2")).to_be_visible()
    assert sent[1]["messages"][0]["content"][:3] == parts


@pytest.mark.slow
def test_chat_with_pictures_leaves_as_a_file_and_comes_back(open_console: Open, page: Page, sent: list[Any]) -> None:
    open_for_pictures(open_console, page)
    give(page, "drop", picture("a.png", 3), then_send=True)
    expect(chats(page)).to_have_text(["a.png"])
    expect(page.locator(".answer .body")).to_have_text("A square.")
    with page.expect_download() as whole:
        act(page, "a.png", "Export as JSON")
    with page.expect_download() as markdown:
        act(page, "a.png", "Export as Markdown")
    assert "\n\n## You\n\n*Picture: a.png*\n\n## Answer" in Path(markdown.value.path()).read_text()
    file = Path(whole.value.path()).read_bytes()
    act(page, "a.png", "Delete")
    page.get_by_role("button", name="Dismiss").click()
    expect(chats(page)).to_have_count(0)
    page.locator("#import-file").set_input_files({"name": "a.json", "mimeType": "application/json", "buffer": file})
    page.get_by_role("link", name="a.png").click()
    expect(images(page)).to_have_attribute("src", url_of(3))


@pytest.mark.slow
def test_picture_that_cannot_be_sent_is_left_out_with_a_line(open_console: Open, page: Page) -> None:
    open_for_pictures(open_console, page)
    give(page, "drop", ("photo.heic", "image/heic", b"x"), ("a.txt", "text/plain", b"words"), picture("a.png", 3))
    toast = page.locator("#toast")
    expect(toast).to_contain_text("photo.heic is of the type image/heic: pictures are PNG, JPEG, WebP or GIF.")
    expect(page.locator("#files li")).to_have_count(2)
    give(page, "drop", ("broken.png", "image/png", png(3)[:40]))
    expect(toast).to_contain_text("broken.png cannot be read as a picture.")
    assert give(page, "paste", picture("cells.png", 9), plain="1\t2", html="<table>")  # a sheet's cells are text
    expect(page.locator("#files li")).to_have_count(2)


def test_model_without_images_gets_no_picture_and_the_page_says_so(open_console: Open, page: Page) -> None:
    open_console()
    expect(page.get_by_label("Add files of text")).to_be_attached()
    give(page, "drop", picture("a.png", 3), ("a.txt", "text/plain", b"words"))
    expect(page.locator("#toast")).to_contain_text("a.png is left out: this model takes no pictures.")
    expect(page.locator("#files li")).to_have_text(["a.txt · 5 B"])


@pytest.mark.slow
def test_picture_that_storage_has_no_room_for_is_kept_out_with_a_note(
    open_console: Open, page: Page, sent: list[Any]
) -> None:
    open_for_pictures(open_console, page)
    page.evaluate(NO_ROOM)
    give(page, "drop", picture("a.png", 3))
    ask(page, "What is it?")
    expect(page.locator("#trouble")).to_contain_text("new pictures are gone when this page closes")
    expect(images(page.locator(".prompt"))).to_be_visible()
    expect(page.locator(".answer .stats")).to_contain_text("stop")
    reload(page)
    prompt = page.locator(".prompt .body")
    expect(prompt).to_contain_text("a.png was not kept: the browser’s storage was full.")
    expect(prompt).to_contain_text("What is it?")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.get_by_label("Version 2 of 2")).to_be_visible()
    assert sent[1]["messages"][0]["content"] == "What is it?"


# A picture of w x h, black, or noise beside a column that is transparent; and whether that column is light afterwards.
MADE = """const { pictureOf } = await import("/console/pictures.js");
const made = async (w, h, type, isNoise) => {
    const canvas = new OffscreenCanvas(w, h);
    const context = canvas.getContext("2d");
    if (isNoise) {
        const image = context.createImageData(w, h);
        const values = new Uint32Array(image.data.buffer);
        for (let i = 0; i < values.length; i++) values[i] = i % w ? Math.random() * 2 ** 32 | 0xff000000 : 0;
        context.putImageData(image, 0, 0);
    } else context.fillRect(0, 0, w, h);
    return canvas.convertToBlob({ type });
};
// As a camera writes it that was held upright: orientation 6.
const upright = (jpeg) => {
    const entry = [1, 0x12, 0, 3, 0, 0, 0, 1, 0, 6, 0, 0, 0, 0, 0, 0];
    const exif = [0x45, 0x78, 0x69, 0x66, 0, 0, 0x4d, 0x4d, 0, 42, 0, 0, 0, 8, 0, 1, ...entry];
    const segment = new Uint8Array([0xff, 0xe1, 0, exif.length + 2, ...exif]);
    return new Blob([jpeg.slice(0, 2), segment, jpeg.slice(2)]);
};
const small = async (blob, type) => {
    const { url, width, height } = await pictureOf(new File([blob], "x", { type }));
    const image = Object.assign(new Image(), { src: url });
    await image.decode();
    const context = new OffscreenCanvas(width, height).getContext("2d");
    context.drawImage(image, 0, 0);
    const [corner] = context.getImageData(0, height >> 1, 1, 1).data;
    return [url.split(";")[0].slice(11), width, height, image.naturalWidth, image.naturalHeight, corner > 127];
};"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "made"),
    [
        ('small(await made(3000, 1500, "image/png"), "image/png")', ["png", 2048, 1024, 2048, 1024, False]),
        ('small(await made(4100, 1, "image/webp"), "image/webp")', ["png", 2048, 1, 2048, 1, False]),
        ('small(await made(30, 20, "image/webp"), "image/webp")', ["png", 30, 20, 30, 20, False]),
        ('small(await made(2100, 700, "image/jpeg"), "image/jpeg")', ["jpeg", 2048, 683, 2048, 683, False]),
        ('small(upright(await made(3000, 1500, "image/jpeg")), "image/jpeg")', ["jpeg", 1024, 2048, 1024, 2048, False]),
        ('small(await made(900, 700, "image/png", true), "image/png")', ["jpeg", 900, 700, 900, 700, True]),
    ],
    ids=["large", "narrow", "still", "jpeg", "upright", "noise"],
)
def test_large_picture_is_made_smaller_before_it_is_sent(modules: Page, script: str, made: list[Any]) -> None:
    assert modules.evaluate(f"async () => {{ {MADE} return {script}; }}") == made


@pytest.mark.long
def test_imported_pictures_are_data_urls_of_known_types(modules: Page) -> None:
    good = {"name": "a", "url": "data:image/png;base64,AAAA", "width": 1, "height": 2048}
    urls = ["javascript:1", "https://e.example/a.png", "data:image/svg+xml;base64,AAAA", 'data:image/png;base64,A"A']
    bad = [*({**good, "url": url} for url in urls), {**good, "width": 2049}, {**good, "height": 0}, {"name": "a"}, None]
    found = modules.evaluate(
        """async (given) => {
            const { soundPictures } = await import("/console/pictures.js");
            return [soundPictures(given), soundPictures(1) ?? null];
        }""",
        [{**good, "evil": 1}, *bad, {**good, "url": ""}],
    )
    assert found == [[good, {**good, "url": ""}], None]
