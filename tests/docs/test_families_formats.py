"""The guide to tools and thinking names the formats of each family that is served, and all formats that there are."""

from __future__ import annotations

import re

from forebay.families import TYPES
from forebay.text.answers.formats import CALL_PARSERS, REASONING_PARSERS
from scripts.site.pages import DOCS

GUIDE = (DOCS / "guide" / "tools-and-thinking.md").read_text()


def _rows(head: str) -> list[list[str]]:
    """Return the cells of the table with this head."""
    table = GUIDE.partition(f"| {head} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\\\)\|", line)[1:-1]] for line in table]


def _names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def test_guide_has_an_entry_for_the_formats_of_each_family() -> None:
    rows = _rows("`model_type`")
    assert sorted(name for row in rows for name in _names(row[0])) == sorted(TYPES)
    for families, calls, thinking in rows:
        words = {word.strip() for word in calls.partition(":")[0].split(",")}
        assert words <= {*(f"`{name}`" for name in CALL_PARSERS), "told", "not read"}, families
        assert words, families
        assert {word.strip() for word in thinking.split(",")} <= {*(f"`{name}`" for name in REASONING_PARSERS), "none"}


def test_guide_lists_each_format_once() -> None:
    listed = [name for row in _rows("`--tool-call-parser`") for name in _names(row[0])]
    assert sorted(listed) == sorted(CALL_PARSERS)
    thinking = [name for row in _rows("`--reasoning-parser`") for name in _names(row[0])]
    assert sorted(thinking) == sorted(REASONING_PARSERS)
