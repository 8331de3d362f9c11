"""One version: that of the package, of the newest release in the changelog and of the README."""

from __future__ import annotations

import re
from datetime import date

from forebay.base.package import __version__
from scripts.site.pages import ROOT

CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
MOST_WORDS = 900  # of a release's notes: about a page


def releases() -> dict[str, str]:
    """Return the text below each heading of the second level, by the heading."""
    parts = re.split(r"(?m)^## (.+)$", CHANGELOG)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_version_is_that_of_the_newest_release_and_of_the_readme() -> None:
    unreleased, newest, *_ = releases()
    assert unreleased == "[Unreleased]"
    assert newest.startswith(f"[{__version__}] - ")
    assert f"This is version {__version__}:" in (ROOT / "README.md").read_text()


def test_releases_are_dated_and_newest_first() -> None:
    found = [re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - (\d{4}-\d{2}-\d{2})", head) for head in [*releases()][1:]]
    assert all(found)
    versions = [tuple(map(int, each.groups()[:3])) for each in found if each]
    dates = [date.fromisoformat(each[4]) for each in found if each]
    assert versions == sorted(versions, reverse=True)
    assert dates == sorted(dates, reverse=True)


def test_notes_of_a_release_fit_on_a_page() -> None:
    counts = {head: len(text.split()) for head, text in releases().items() if head != "[Unreleased]"}
    assert not {head: count for head, count in counts.items() if count > MOST_WORDS}
