"""The page of what is not supported denies nothing that a flag, a route or a model type has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import pytest

from forebay.base.package import ROOT
from forebay.config.server_args import FLAGS
from forebay.families.config.model_config import config_of
from forebay.families.small import LIKES, small_config
from forebay.server.app import ROUTES

PAGE: Final = ROOT / "docs" / "guide" / "not-supported.md"
FILLERS: Final = {"a", "at", "but", "by", "for", "in", "it", "of", "on", "that", "the", "with", "one"}
# Each pair reviewed: words of the page, and a flag or route that has the same words and another meaning.
HOMONYMS: Final = {
    ("images", "--max-image-bytes"): "the row names the types that take images",
    ("files", "--api-key-file"): "the row means the API of files",
    ("files", "--admin-api-key-file"): "the row means the API of files",
    ("files", "--cluster-key-file"): "the row means the API of files",
}
SEVERAL: Final = "several GPUs, or machines"  # its words of one model are no feature


def rows() -> list[tuple[str, str]]:
    """Return what the page denies, and what it names instead."""
    lines = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [(cells[1].strip(), cells[2].strip()) for cells in lines if cells[1].strip()]


def stems(text: str) -> frozenset[str]:
    words = {re.sub(r"(ation|ing|ed|es|s|e)$", "", word) for word in re.findall(r"[a-z]+", text.lower())}
    return frozenset(words) - FILLERS - {""}


def denied_items(denied: str) -> list[str]:
    """Return the phrases of a row, without what it says in brackets, in code or behind a condition."""
    plain = re.sub(r"`[^`]*`|\([^)]*\)", "", denied).partition(SEVERAL)[0]
    return [item.strip() for item in re.split(r"[,;]| and | or ", plain)]


def contradictions(denied: str) -> Iterator[str]:
    """Yield a line for each flag or route whose name has all words of a phrase of the row."""
    names = [*(flag.option for flag in FLAGS), *(route.path for route in ROUTES)]
    for item in filter(stems, denied_items(denied)):
        for name in names:
            if stems(item) <= stems(name) and (item, name) not in HOMONYMS:
                yield f"{item!r} is denied, and there is {name}"


def test_page_denies_no_feature_of_a_flag_or_route() -> None:
    assert [line for denied, _ in rows() for line in contradictions(denied)] == []


@pytest.mark.parametrize(
    ("denied", "is_found"),
    [
        ("stored responses, batches", True),
        ("sleep", True),
        ("embeddings", True),
        ("batches, files, assistants", False),
        ("beam search", False),
    ],
)
def test_contradictions_finds_what_exists(denied: str, is_found: bool) -> None:
    assert bool(list(contradictions(denied))) == is_found


def test_page_names_routes_and_flags_as_they_are() -> None:
    options = {option for flag in FLAGS for option in flag.options}
    routes = {(route.method, route.path) for route in ROUTES}
    for denied, instead in rows():
        for code in re.findall(r"`([^`]+)`(?! of | with| without)", denied):
            method, _, path = code.rpartition(" ")
            if path.startswith("/"):
                assert not {(verb, path) for verb in ([method] if method else ["GET", "POST"])} & routes, code
        for code in re.findall(r"`(--[a-z-]+)", denied + instead):
            assert code in options, code
        for code in re.findall(r"`([A-Z]* ?/[a-z_/]+)`", instead):
            method, _, path = code.rpartition(" ")
            assert any((verb, path) in routes for verb in ([method] if method else ["GET", "POST"])), code


def test_page_names_the_types_that_take_images() -> None:
    (denied,) = (denied for denied, _ in rows() if denied.startswith("images, but for"))
    named = set(re.findall(r"`(\w+)`", denied))
    assert named == {
        name
        for name in LIKES
        if config_of(small_config(name, hidden_size=64, num_layers=4, vocab_size=512)).vision is not None
    }
