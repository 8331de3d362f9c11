"""Calls and thinking that readers of other engines find in twenty answers of each format are found at every split.

Each file names its readers. An answer that a reader takes otherwise has `differs`, with the reason, and `read`.
`reference_cuts.json` has an answer of each format and, for each of its calls, the least length of a cut-off answer in
which the reader finds the call as in the whole one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from forebay.text.answers.formats import CALL_FORMATS
from forebay.text.answers.reading import AnswerFormats
from tests.text.answers.spellings import SPELLINGS
from tests.text.answers.test_reading import joined, read


def _recorded(file: str) -> dict[str, Any]:
    facts = json.loads(Path(__file__).with_name(file).read_text())
    assert facts.pop("reader")
    return facts


FILES: Final = {"sglang": "reference_calls.json", "vllm": "reference_calls_vllm.json"}
ROWS: Final = {(engine, name): rows for engine, file in FILES.items() for name, rows in _recorded(file).items()}
CUTS: Final = _recorded("reference_cuts.json")
THINKING: Final = _recorded("reference_thinking.json")
READ_AS: Final = {"granite_20b": "granite", "granite4": "hermes"}  # further spellings of these formats
WITHOUT_READER: Final = {"command_r", "glm4"}  # formats that no published reader takes
every_engine_and_format = pytest.mark.parametrize(("engine", "name"), ROWS)


def calls_in(name: str, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Return the text and the calls of an answer that comes in pieces."""
    found, _ = joined(read(SPELLINGS[READ_AS.get(name, name)].formats, pieces))
    return found.said, list(found.calls)


def decoded(arguments: str) -> Any:
    """Return the value of a JSON text, and the text itself if it is none."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


@every_engine_and_format
def test_recorded_answers_have_the_calls_of_the_reference(engine: str, name: str) -> None:
    rows = ROWS[engine, name]
    assert len(rows) == 20
    assert sum("differs" in row for row in rows) <= 5
    for row in rows:
        found = [[called, decoded(arguments)] for called, arguments in calls_in(name, [row["text"]])[1]]
        assert found == row.get("read", row["calls"]), row["text"]
        assert ("differs" in row) == ("read" in row)


@pytest.mark.quick(1)
@every_engine_and_format
def test_recorded_answers_are_read_the_same_at_every_split(engine: str, name: str) -> None:
    for row in ROWS[engine, name]:
        text = row["text"]
        whole = calls_in(name, [text])
        assert calls_in(name, list(text)) == whole
        for at in range(1, len(text)):
            assert calls_in(name, [text[:at], text[at:]]) == whole, (text[:at], text[at:])


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", CUTS)
def test_cut_off_answer_has_the_whole_calls_of_the_reference_and_no_other_name(name: str) -> None:
    row = CUTS[name]
    whole = [(called, arguments) for called, arguments in row["calls"]]
    assert calls_in(name, [row["text"]])[1], "the answer has calls"
    least = [len(row["text"]) + 1] * len(whole)
    for at in range(len(row["text"]), -1, -1):
        calls = calls_in(name, [row["text"][:at]])[1]
        assert [called for called, _ in calls] == [called for called, _ in whole[: len(calls)]], row["text"][:at]
        for number, (called, arguments) in enumerate(calls):
            if (called, decoded(arguments)) == whole[number]:
                least[number] = at
    latest = row.get("read", row["found"])
    assert all(ours <= theirs for ours, theirs in zip(least, latest, strict=True)), (least, latest)
    assert ("differs" in row) == ("read" in row)


def thinking_in(name: str, pieces: list[str]) -> list[str]:
    """Return the thinking and the text of an answer that comes in pieces, without white space around them."""
    found, _ = joined(read(AnswerFormats(None, name), pieces))
    return [found.thought.strip(), found.said.strip()]


@pytest.mark.parametrize("name", THINKING)
def test_recorded_answers_have_the_thinking_of_the_reference_at_every_split(name: str) -> None:
    assert len(THINKING[name]) == 20
    assert sum("differs" in row for row in THINKING[name]) <= 4
    for row in THINKING[name]:
        text, wanted = row["text"], row.get("read", [row["thought"], row["said"]])
        for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))):
            assert thinking_in(name, pieces) == wanted, pieces
        assert ("differs" in row) == ("read" in row)


def test_every_format_of_calls_has_recorded_answers() -> None:
    recorded = {READ_AS.get(name, name) for _, name in ROWS}
    formats = {SPELLINGS[name].formats.calls for name in recorded}
    assert set(CALL_FORMATS) - formats == WITHOUT_READER
