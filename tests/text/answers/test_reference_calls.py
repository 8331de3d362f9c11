"""The calls that another engine's readers find in twenty answers of each format, recorded, are found at every split.

`reference_calls.json` names the reader. An answer that it reads otherwise has `differs`, with the reason, and `read`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from tests.text.answers.spellings import SPELLINGS
from tests.text.answers.test_reading import joined, read

RECORDED: Final[dict[str, Any]] = json.loads(Path(__file__).with_name("reference_calls.json").read_text())
FORMATS: Final = [name for name in RECORDED if name != "reader"]


def calls_in(name: str, pieces: list[str]) -> tuple[str, list[Any]]:
    """Return the text and the calls of an answer that comes in pieces."""
    found, _ = joined(read(SPELLINGS[name].formats, pieces))
    return found.said, [[called, json.loads(arguments)] for called, arguments in found.calls]


@pytest.mark.parametrize("name", FORMATS)
def test_recorded_answers_have_the_calls_of_the_reference(name: str) -> None:
    rows = RECORDED[name]
    assert len(rows) == 20
    assert sum("differs" in row for row in rows) <= 5
    for row in rows:
        assert calls_in(name, [row["text"]])[1] == row.get("read", row["calls"]), row["text"]
        assert ("differs" in row) == ("read" in row)


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", FORMATS)
def test_recorded_answers_are_read_the_same_at_every_split(name: str) -> None:
    for row in RECORDED[name]:
        text = row["text"]
        whole = calls_in(name, [text])
        assert calls_in(name, list(text)) == whole
        for at in range(1, len(text)):
            assert calls_in(name, [text[:at], text[at:]]) == whole, (text[:at], text[at:])
