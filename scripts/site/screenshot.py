"""The picture of the page in the README: `python -m scripts.site.screenshot` serves the default model, talks to it from
several sides, and takes it with Chromium."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import sync_playwright

from scripts.site.drawings import FIGURES

PORT = 31999
URL = f"http://127.0.0.1:{PORT}"
SYSTEM = "You are a helpful assistant who answers in full sentences and gives one example for each thing that you say. "
TOPICS = ("rivers", "turbines", "bridges", "lakes", "rain", "mills", "canals", "dams")
# An answer without a limit is promised most of so small a cache: it would wait for all the others to end.
LIMIT = 160
SETTINGS = json.dumps({"options": {"max_tokens": LIMIT}})
TALK = ("Why is the sky blue?", "And why is it red in the evening?", "Write a short story about a miller and a river.")


@contextmanager
def served() -> Iterator[None]:
    words = ["serve", "--port", str(PORT), "--kv-cache-bytes", "96MiB", "--log-level", "warning"]
    server = subprocess.Popen([sys.executable, "-m", "forebay", *words], stdout=subprocess.DEVNULL)
    try:
        while not answers("/ready"):
            time.sleep(0.5)
        yield
    finally:
        server.terminate()
        server.wait()


def answers(path: str) -> bool:
    try:
        return urllib.request.urlopen(URL + path, timeout=5).status == 200
    except OSError:
        return False


def talk(topic: str, stop: threading.Event) -> None:
    """A conversation that grows, until told to stop."""
    messages = [{"role": "system", "content": SYSTEM * 6}]
    while not stop.is_set():
        messages.append({"role": "user", "content": f"Tell me about {topic}."})
        body = json.dumps({"messages": messages, "max_tokens": LIMIT}).encode()
        asked = urllib.request.Request(f"{URL}/v1/chat/completions", body, headers={"content-type": "application/json"})
        said = json.load(urllib.request.urlopen(asked, timeout=600))["choices"][0]["message"]["content"]
        messages = [*messages, {"role": "assistant", "content": said}][:9]


def main() -> None:
    stop = threading.Event()
    with served(), sync_playwright() as playwright:
        threads = [threading.Thread(target=talk, args=(topic, stop)) for topic in TOPICS]
        for thread in threads:
            thread.start()
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 1280, "height": 800})
        page.add_init_script(f"localStorage.setItem('forebay.settings', {json.dumps(SETTINGS)})")
        page.goto(URL)
        for text in TALK:
            page.wait_for_function("document.querySelector('#ready').dataset.state === 'ready'")
            page.wait_for_selector("#stop", state="hidden", timeout=120_000)
            page.fill("#prompt", text)
            page.press("#prompt", "Enter")
            page.wait_for_timeout(8_000)
        page.screenshot(path=FIGURES / "page.png")
        chromium.close()
        stop.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
