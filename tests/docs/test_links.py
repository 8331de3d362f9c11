"""Every link of the documents leads to a file, and to a heading of it where it names one."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from forebay.server.openapi.page import anchor
from scripts.site.pages import DOCS, MADE, ROOT, complete, written

READER = MarkdownIt("commonmark").enable("table")


@cache
def pages() -> dict[Path, str]:
    """By their paths in the tree, with what is made."""
    own = {DOCS / name: complete(text) for name, text in written().items()}
    others = [*ROOT.glob("*.md"), *(ROOT / "benchmarks").glob("*.md"), *(ROOT / "examples").glob("*.md")]
    return own | {path: path.read_text() for path in others}


@cache
def tokens_of(text: str) -> list[Token]:
    return READER.parse(text)


def links(text: str) -> list[str]:
    inside = (token.children or [] for token in tokens_of(text) if token.type == "inline")
    found = [child for children in inside for child in children if child.type in ("link_open", "image")]
    return [str(child.attrs.get("href", child.attrs.get("src"))) for child in found]


@cache
def anchors(text: str) -> set[str]:
    tokens = tokens_of(text)
    heads = (tokens[i + 1] for i, token in enumerate(tokens) if token.type == "heading_open")
    return {anchor("".join(part.content for part in head.children or ())) for head in heads}


def broken(path: Path, text: str, known: dict[Path, str]) -> list[str]:
    """The links of a page that lead nowhere."""
    wrong = []
    for link in links(text):
        parts = urlsplit(link)
        if parts.scheme in ("http", "https"):
            continue
        target = (path.parent / parts.path).resolve() if parts.path else path
        there = target in known or target.exists()
        if not there or (parts.fragment and parts.fragment not in anchors(known.get(target, ""))):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("link", ["gone.md", "#gone", "page.md#gone", "../gone/page.md"])
def test_a_link_that_leads_nowhere_is_found(link: str) -> None:
    page = DOCS / "page.md"
    text = f"# A heading: `code`!\n\n[x]({link}) [y](#a-heading-code) [z](https://example.org/gone) [w](index.md)"
    assert broken(page, text, {page: text}) == [link]


@pytest.mark.long
def test_every_link_leads_somewhere() -> None:
    assert {str(path.relative_to(ROOT)): wrong for path, text in pages().items()
            if (wrong := broken(path, text, pages()))} == {}  # fmt: skip


def test_every_page_is_in_the_list_of_pages() -> None:
    listed = {DOCS / name for name in (DOCS / "index.md").read_text().split() if (DOCS / f"{name}.md").exists()}
    there = (path for path in pages() if DOCS in path.parents and path.name != "index.md")
    pages_there = {path.with_suffix("") for path in there if not path.stem.endswith("-notebook")}
    assert {path for path in pages_there - listed if path.parent.name not in ("decisions", "figures")} == set()


def test_everything_that_is_made_stands_on_a_page() -> None:
    texts = "".join(written().values())
    assert {name for name in MADE if f"<!-- made: {name} -->" not in texts} == set()
