"""A headless Chromium on the real server, behind which an engine says what the test wants it to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import BrowserContext, ConsoleMessage, Page, Playwright, Request, expect, sync_playwright

from forebay.requests.sampling_params import SamplingParams
from forebay.text.tokenizer import Tokenizer
from tests.deadlines import HANGS_S
from tests.server.conftest import Running, launch, tokenizer
from tests.server.fake_engine import FakeEngine

__all__ = ["launch", "tokenizer"]  # fixtures

ENDING = ("503", "ERR_CONNECTION_", "ERR_EMPTY_RESPONSE")  # what a page sees of a server that ends, and then of none
END = 2  # the tiny tokenizer's end of sequence
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # All pages are in one process of the browser: a test's page takes three quarters of the CPU.
    "--disable-site-isolation-trials",
    "--renderer-process-limit=1",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = str(Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.browser)


# The package's and not the session's: while it is up an event loop runs in this thread, and no other test could have
# one.
@pytest.fixture(scope="package")
def playwright() -> Iterator[Playwright]:
    with sync_playwright() as started:
        yield started


@pytest.fixture(scope="package")
def chromium(
    playwright: Playwright, browser: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BrowserContext]:
    context = playwright.chromium.launch_persistent_context(
        tmp_path_factory.mktemp("profile"),
        executable_path=browser,
        headless=True,
        args=ARGUMENTS,
        viewport={"width": 1200, "height": 800},
    )
    context.set_default_timeout(1000 * HANGS_S)
    expect.set_options(timeout=1000 * HANGS_S)
    yield context
    context.close()


class Watch:
    """What a page must never do: send a request elsewhere, or complain."""

    def __init__(self, page: Page) -> None:
        self.origin = ""
        self.elsewhere: list[str] = []
        self.complaints: list[str] = []
        self.expected: tuple[str, ...] = ()
        page.on("request", self._request)
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.complaints.append(f"exception: {error}"))

    def _request(self, request: Request) -> None:
        url = urlsplit(request.url)
        if f"{url.scheme}://{url.netloc}" != self.origin:
            self.elsewhere.append(request.url)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def verify(self) -> None:
        assert self.elsewhere == []
        assert [text for text in self.complaints if not any(part in text for part in self.expected)] == []


@pytest.fixture
def watch(page: Page) -> Iterator[Watch]:
    watch = Watch(page)
    yield watch
    watch.verify()


@pytest.fixture
def page(chromium: BrowserContext) -> Iterator[Page]:
    page = chromium.new_page()
    yield page
    page.close()


# Transactions over the same stores run one after the other: when this one is through, those begun before it are.
SETTLED = """async () => {
    const opening = indexedDB.open("forebay");
    const db = await new Promise((done) => (opening.onsuccess = () => done(opening.result)));
    const tx = db.transaction(db.objectStoreNames, "readwrite");
    tx.objectStore("messages").count();
    await new Promise((done) => (tx.oncomplete = done));
    db.close();
}"""


def reload(page: Page) -> None:
    """Loads the page again once the browser has kept what the page has written."""
    page.evaluate(SETTLED)
    page.reload()


Open = Callable[..., Running]


@pytest.fixture
def open_console(launch: Open, page: Page, watch: Watch, tokenizer: Tokenizer) -> Open:
    """`open_console(text, ...)`: the page of a server whose model always answers `text`, a token each `interval_s`."""

    def go(
        text: str = "",
        *,
        make_engine: Callable[[], FakeEngine] | None = None,
        interval_s: float = 0.0,
        **config: object,
    ) -> Running:
        def saying(prompt: list[int], params: SamplingParams) -> list[int]:
            return [*tokenizer.encode(text), END]

        server = launch(make_engine or (lambda: FakeEngine(saying, interval_s=interval_s)), **config)
        watch.origin = server.url
        page.goto(server.url)
        return server

    return go
