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


RENDER = """const { Markdown } = await import("/console/markdown.js");
            const root = document.createElement("div");
            new Markdown(root).update(text, true);"""

# A chat of one message that was deleted, in storage or, where there is none, in memory.
STORE = """const { Store } = await import("/console/store.js");
            const store = new Store({ onTrouble() {}, onChange() {} });
            if (!isKept) store.opening = Promise.resolve();
            const chat = { id: "c0000001", deleted: 1 };
            await store.patch(chat, { deleted: 1 });
            await store.write([{ id: "m0000001", conversation: "c0000001", content: "" }]);"""
MARK = '<button class="quiet" type="button" aria-label="{}" role="link">{}</button>'
NOTES = f'<p>a[^x] <sup class="note-mark">{MARK.format("Note 1", "1")}</sup></p>'
NOTES += '<div class="note" tabindex="-1"><sup>1</sup>'
NOTES += f"<span>one<br>two</span>{MARK.format('Back from note 1', '↩')}</div>"
NOTES += '<div class="note"><sup>2</sup><span>&lt;b&gt;</span></div><p>b</p>'
MARKDOWN = [
    ("a *b* **c** `d` ~~e~~", "<p>a <em>b</em> <strong>c</strong> <code>d</code> <del>e</del></p>"),
    ("# One\ntwo\nthree", "<h3>One</h3><p>two<br>three</p>"),
    ("- a\n- b\n  - c", "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul>"),
    ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    ("> a\n\n---", "<blockquote><p>a</p></blockquote><hr>"),
    ("snake_case_name 2 * 3 * 4 **open", "<p>snake_case_name 2 * 3 * 4 **open</p>"),
    (r"\*not em\* <b>x</b> H<sub>2</sub>O", "<p>*not em* &lt;b&gt;x&lt;/b&gt; H<sub>2</sub>O</p>"),
    ("`a < b`", "<p><code>a &lt; b</code></p>"),
    ("[x](javascript:alert(1)) [y](/admin)", "<p>[x](javascript:alert(1)) [y](/admin)</p>"),
    (
        "|a|b|\n|:-:|--:|\n|1|2|",
        '<div class="table" tabindex="0" role="group" aria-label="Table"><table><thead><tr><th align="center">a</th>'
        '<th align="right">b</th></tr></thead><tbody><tr><td align="center">1</td><td align="right">2</td></tr></tbody>'
        "</table></div>",
    ),
    ("- [x] a", '<ul><li><span class="task">☑</span> a</li></ul>'),
    ("a $5 and $6 b", "<p>a $5 and $6 b</p>"),
    ("a[^x] [^1]\n[^1]: one\ntwo\n[^2]: <b>\n\nb", NOTES),
    ("see [it][1]\n\nafter\n\n[1]: https://e.example/x", None),
    ("", ""),
]


@pytest.mark.parametrize(("source", "html"), MARKDOWN)
def test_markdown_becomes_the_expected_nodes(modules: Page, source: str, html: str | None) -> None:
    got = rendered(modules, source)
    if html is not None:
        assert got == html
    else:  # a definition at the end holds for what stands before it
        assert 'href="https://e.example/x" target="_blank" rel="noopener noreferrer nofollow"' in got
        assert 'data-host="e.example"' in got


DEEP = ["> " * 5000, "- " * 5000, "1. " * 5000, "word " * 5000, "  " * 400 + "- a", "[" * 9000 + "](" * 900]


@pytest.mark.parametrize("source", DEEP)
def test_markdown_that_no_reader_would_write_is_shown_all_the_same(modules: Page, source: str) -> None:
    text = modules.evaluate(f"async (text) => {{ {RENDER} return root.textContent; }}", source)
    assert text.strip()[-3:] == source.strip()[-3:]


def test_growing_text_is_read_block_by_block_and_keeps_the_nodes_that_are_done(modules: Page) -> None:
    """Read whole at each step, 400 blocks in 400 steps would be 80,000."""
    got: Any = modules.evaluate(
        """async () => {
            const { Markdown } = await import("/console/markdown.js");
            const root = document.createElement("div");
            const markdown = new Markdown(root);
            const parse = DOMParser.prototype.parseFromString;
            let parsed = 0;
            DOMParser.prototype.parseFromString = function (...of) { parsed++; return parse.apply(this, of); };
            let text = "";
            try {
                for (let i = 0; i < 400; i++) markdown.update((text += `block *${i}*\n\n`), false);
            } finally {
                DOMParser.prototype.parseFromString = parse;
            }
            const [first] = root.childNodes;
            markdown.update(text + "the end", true);
            return [parsed, root.childNodes[0] === first, root.childNodes.length, root.lastChild.textContent];
        }"""
    )
    assert got[0] <= 1200
    assert got[1:] == [True, 401, "the end"]


@pytest.mark.parametrize("step", [1, 3, 50])
def test_text_that_came_in_pieces_looks_like_text_that_came_whole(modules: Page, step: int) -> None:
    text = "# A\n\npara **b\nc** `d`\n- one\n\n  two\n- three\n\n```py\nx = 1\n\ny\n```\n"
    text += "|a|b|\n|-|-|\n|1|2|\n\n> q\nr\n\n1. z\r\n\nend"
    pieces, whole = modules.evaluate(
        f"""async ([text, step]) => {{
            {RENDER}
            const pieces = document.createElement("div");
            const growing = new Markdown(pieces);
            for (let i = step; i < text.length; i += step) growing.update(text.slice(0, i), false);
            growing.update(text, true);
            await new Promise((done) => setTimeout(done)); // both are highlighted
            return [pieces.textContent, root.textContent];
        }}""",
        [text, step],
    )
    assert pieces == whole


def test_open_code_block_grows_in_its_own_node(modules: Page) -> None:
    assert modules.evaluate(
        r"""async () => {
            const { Markdown } = await import("/console/markdown.js");
            const root = document.createElement("div");
            const markdown = new Markdown(root);
            markdown.update("```py\nx = 1", false);
            const [figure] = root.childNodes;
            const text = figure.querySelector("code").firstChild;
            markdown.update("```py\nx = 1\ny = 2", false);
            return [root.firstChild === figure, text.isConnected || text.parentNode !== null, text.data];
        }"""
    ) == [True, True, "x = 1\ny = 2"]


def test_tree_keeps_the_versions_of_a_message(modules: Page) -> None:
    assert modules.evaluate(
        """async () => {
            const { Tree } = await import("/console/tree.js");
            const ask = { id: "a", parent: null }, one = { id: "b", parent: "a" }, two = { id: "c", parent: "a" };
            const after = { id: "d", parent: "b" };
            const tree = new Tree([after, two, one, ask]);
            const ids = (list) => list.map(({ id }) => id).join("");
            const below = tree.below(one);
            const before = [ids(tree.versions(one)), ids(tree.path("d")), tree.leaf("a"), tree.leaf("b"), ids(below)];
            tree.remove(below);
            return [...before, ids(tree.versions(two)), tree.leaf(null), ids(tree.path("gone"))];
        }"""
    ) == ["bc", "abd", "c", "d", "bd", "c", "c", ""]


def test_ids_sort_by_when_they_were_made(modules: Page) -> None:
    ids = modules.evaluate(
        """async () => {
            const { newId } = await import("/console/tree.js");
            return Array.from({ length: 1000 }, newId);
        }"""
    )
    assert ids == sorted(set(ids))


def test_imported_chats_are_checked_field_by_field(modules: Page) -> None:
    told, kept = modules.evaluate(
        """async () => {
            const { fromJson } = await import("/console/transfer.js");
            const head = { format: "forebay.conversations", version: 1 };
            const message = { id: "m0000001", parent: null, role: "user", content: "hi", evil: 1, finish: {} };
            const options = { temperature: 9, top_p: 0.5, x: 1 };
            // As pages once named them: an answer made within the millisecond of its question sorts before it.
            const answer = { ...message, id: "m0000000", parent: "m0000001", role: "assistant", content: "ho" };
            const chat = { id: "c0000001", title: 7, options, messages: [answer, message] };
            const circle = [{ ...message, parent: "m0000009" }, { ...message, id: "m0000009", parent: "m0000001" }];
            const told = [
                "{", "[]", JSON.stringify({ ...head, version: 2, conversations: [] }),
                JSON.stringify({ ...head, conversations: [{ ...chat, id: "<b>" }] }),
                JSON.stringify({ ...head, conversations: [{ ...chat, messages: circle }] }),
            ].map((text) => { try { fromJson(text); } catch (error) { return error.message; } });
            return [told, fromJson(JSON.stringify({ ...head, conversations: [chat] }))];
        }"""
    )
    assert [text.split(" ")[0] for text in told] == ["this", "these", "it", "chat", "chat"]
    assert told[-1] == "chat 1 has a message that is above itself."
    [chat] = kept
    assert (chat["title"], chat["options"]["temperature"], chat["options"]["top_p"]) == ("Imported chat", "", 0.5)
    answer, message = chat["messages"]
    assert message == {
        "id": "m0000001",
        "conversation": "c0000001",
        "parent": None,
        "role": "user",
        "content": "hi",
        "finish": "",
    }
    assert (answer["id"], answer["parent"], answer["content"]) == ("m0000000", "m0000001", "ho")


@pytest.mark.parametrize("is_kept", [True, False])
def test_chat_that_comes_back_while_it_is_removed_for_good_stays(modules: Page, is_kept: bool) -> None:
    assert modules.evaluate(
        f"""async (isKept) => {{
            {STORE}
            const {{ messages }} = store;
            store.messages = async (id) => {{
                const found = await messages.call(store, id);
                await store.patch(chat, {{ deleted: 0 }}); // behind the look, before anything is removed
                return found;
            }};
            await store.purge("c0000001");
            const {{ deleted }} = await store.conversation("c0000001");
            return [deleted, (await messages.call(store, "c0000001")).length];
        }}""",
        is_kept,
    ) == [0, 1]


def test_chat_can_be_removed_where_the_storage_is_too_full_to_note_that_it_is_deleted(modules: Page) -> None:
    assert modules.evaluate(
        f"""async () => {{
            const isKept = true;
            {STORE}
            await store.patch(chat, {{ deleted: 0 }});
            const {{ put }} = IDBObjectStore.prototype;
            IDBObjectStore.prototype.put = () => {{ throw new DOMException("full", "QuotaExceededError"); }};
            try {{
                await store.patch(chat, {{ deleted: 1 }});
                await store.purge("c0000001");
            }} finally {{
                IDBObjectStore.prototype.put = put;
            }}
            return [(await store.conversation("c0000001")) ?? null, await store.messages("c0000001")];
        }}"""
    ) == [None, []]


def test_engine_that_began_anew_between_two_looks_generated_no_negative_tokens(modules: Page) -> None:
    assert modules.evaluate(
        """async () => {
            const { History } = await import("/console/charts.js");
            const history = new History();
            let now = 0;
            const clock = performance.now;
            performance.now = () => (now += 1000);
            try {
                for (const generated_tokens of [0, 100, 40, 60]) history.take({ counters: { generated_tokens } });
            } finally {
                performance.now = clock;
            }
            return history.points.map((point) => point && point.generated);
        }"""
    ) == [None, 100, None, 20]


@pytest.mark.long
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
    html: str = modules.evaluate(f"async (text) => {{ {RENDER} return root.innerHTML; }}", source)
    return html.replace(' dir="auto"', "").replace("\n", "")
