"""Documents agree with the tree: numbers of decisions, layers of packages, and the counts in the README."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from scripts.site.pages import DOCS, ROOT
from scripts.site.readme import README, filled
from tests.test_floors import FLOORS

MOST_RECORDS = 20  # a record weighs alternatives; how something works is in the design or a docstring
LIST = (DOCS / "decisions.md").read_text()
UNUSED = {60}


def records() -> dict[int, str]:
    """Return the names of the pages of decisions, by number."""
    return {int(path.name[:4]): path.name for path in (DOCS / "decisions").glob("*.md")}


def listed() -> list[int]:
    """Return the numbers that the two tables of the list have."""
    return [int(number) for number in re.findall(r"(?m)^\| (\d+) \|", LIST)]


def mentioned() -> Iterator[tuple[str, int]]:
    """Yield each mention of a decision's number, with its file."""
    texts = [path for top in ("forebay", "docs", "tests") for path in (ROOT / top).rglob("*")]
    for path in texts:
        if path.suffix in (".py", ".md", ".cpp", ".h") and path != DOCS / "decisions.md":
            for number in re.findall(r"\b[Dd]ecision (\d+)\b", path.read_text()):
                yield str(path.relative_to(ROOT)), int(number)


def test_decisions_each_number_is_listed_once_with_its_page_or_its_place() -> None:
    numbers = listed()
    assert sorted(numbers) == sorted({*range(1, max(numbers) + 1)} - UNUSED)
    pages = {int(number): name for number, name in re.findall(r"\| (\d+) \| .*\(decisions/([\w-]+\.md)\)", LIST)}
    assert pages == records()


def test_decisions_mentioned_in_the_tree_are_listed() -> None:
    known = {*listed()}
    assert {(place, number) for place, number in mentioned() if number not in known} == set()


def test_decisions_are_few() -> None:
    assert len(records()) <= MOST_RECORDS


def test_tour_lists_each_package_with_its_layer() -> None:
    rows = re.findall(r"(?m)^\| ([\d.]+) \| `([a-z/]+)` \|", (DOCS / "tour.md").read_text())
    layers = [float(layer) for layer, _ in rows]
    assert layers == sorted(layers)
    packages = {
        name: layer
        for name, layer in FLOORS.items()
        if not name.endswith(".py") and not name.startswith(("engine/", "runtime/"))
    }
    assert {name: float(layer) for layer, name in rows} == packages


def test_readme_has_the_numbers_of_types_as_counted() -> None:
    text = README.read_text()
    assert text == filled(text), "run `python -m scripts.site.readme`"


def test_readme_numbers_are_replaced_and_must_be_there() -> None:
    text = README.read_text()
    assert filled(text.replace("[64 types]", "[3 types]")) == filled(text)
    with pytest.raises(ValueError, match="occurs 0 times"):
        filled(text.replace("types]", "kinds]"))
