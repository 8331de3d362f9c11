"""What the page's own modules compute, in the browser that runs them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page

from tests.server.conftest import Running, shared

__all__ = ["shared"]  # a fixture


@pytest.fixture(scope="module")
def modules(chromium: BrowserContext, shared: Running) -> Iterator[Page]:
    page = chromium.new_page()
    page.goto(shared.url)
    yield page
    page.close()


MARKDOWN = [
    ("a *b* **c** `d` ~~e~~", "<p>a <em>b</em> <strong>c</strong> <code>d</code> <del>e</del></p>"),
    ("# One\ntwo", "<h3>One</h3><p>two</p>"),
    ("- a\n- b\n  - c\n\n1. d\n2. e", "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><ol><li>d</li><li>e</li></ol>"),
    ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    ("> a\n> b\n\n---", "<blockquote><p>a\nb</p></blockquote><hr>"),
    ("snake_case_name 2 * 3 * 4 **open", "<p>snake_case_name 2 * 3 * 4 **open</p>"),
    (r"\*not em\* <b>text</b> &amp;", "<p>*not em* &lt;b&gt;text&lt;/b&gt; &amp;amp;</p>"),
    ("`a < b`", "<p><code>a &lt; b</code></p>"),
    ("**a *b* c**", "<p><strong>a <em>b</em> c</strong></p>"),
    ("[x](javascript:alert(1))", "<p>[x](javascript:alert(1))</p>"),
    ("", ""),
]


@pytest.mark.parametrize(("source", "html"), MARKDOWN)
def test_markdown_becomes_the_expected_nodes(modules: Page, source: str, html: str) -> None:
    assert rendered(modules, source) == html


@pytest.mark.parametrize("unit", ["*", "[", "`", "_a", "**a ", "![", "<", "> ", "- ", "~~~\n", "|a", "https://", "\\"])
def test_markdown_of_any_shape_takes_few_looks_at_each_character(modules: Page, unit: str) -> None:
    """Two, or one more for each level of nesting; a scanner that began anew at each mark would take thousands."""
    text = unit * (20_000 // len(unit))
    looks = modules.evaluate(
        """async (text) => {
            const { render } = await import("/console/markdown.js");
            const exec = RegExp.prototype.exec;
            let looks = 0;
            RegExp.prototype.exec = function (...of) { looks++; return exec.apply(this, of); };
            try {
                render(document.createElement("div"), text);
            } finally {
                RegExp.prototype.exec = exec;
            }
            return looks;
        }""",
        text,
    )
    assert looks <= 16 * len(text)


def test_growing_text_keeps_the_nodes_that_did_not_change(modules: Page) -> None:
    same: Any = modules.evaluate(
        """async () => {
            const { render } = await import("/console/markdown.js");
            const root = document.createElement("div");
            render(root, "one\\n\\ntwo");
            const [first, second] = root.childNodes;
            render(root, "one\\n\\ntwo and more");
            return [root.childNodes[0] === first, root.childNodes[1] === second, root.textContent];
        }"""
    )
    assert same == [True, False, "onetwo and more"]


@pytest.mark.parametrize("cut", [1, 2, 3, 7])
def test_event_stream_may_be_cut_anywhere(modules: Page, cut: int) -> None:
    got = modules.evaluate(
        """async (cut) => {
            const { sseData } = await import("/console/api.js");
            const bytes = new TextEncoder().encode(': ping\\n\\ndata: {"a": "é"}\\r\\n\\r\\ndata:x\\ndata: y\\n\\n');
            const stream = new ReadableStream({
                start(controller) {
                    for (let i = 0; i < bytes.length; i += cut) controller.enqueue(bytes.slice(i, i + cut));
                    controller.close();
                },
            });
            const out = [];
            for await (const data of sseData(stream)) out.push(data);
            return out;
        }""",
        cut,
    )
    assert got == ['{"a": "é"}', "x\ny"]


def rendered(modules: Page, source: str) -> str:
    html: str = modules.evaluate(
        """async (text) => {
            const { render } = await import("/console/markdown.js");
            const root = document.createElement("div");
            render(root, text);
            return root.innerHTML.replaceAll(' dir="auto"', "");
        }""",
        source,
    )
    return html
