"""The log as JSON: one object in each line, whatever writes to the streams of a process or its children."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import Any

import pytest

from forebay.base.json_lines import rfc3339
from forebay.base.log import JsonFormatter, event

PROGRAM = """
import logging, os, sys, threading, warnings
from forebay.base import child
from forebay.base.log import event, get_logger, setup_logging
from forebay.base.relay import relaying

with relaying("server"):
    setup_logging("info", process="server", format="json")
    get_logger("x").info(event("first", number=1))
    logging.getLogger("a.library").warning("two\\nlines")
    warnings.warn("old")
    print("printed")
    print("forebay: note: a note", file=sys.stderr)
    os.write(2, b"from C, without an end")
    thread = threading.Thread(target=lambda: 1 / 0, name="divider")
    thread.start()
    thread.join()
    child.start(["-c", sys.argv[1]], descriptors=[], label="engine").wait()
print("plain again")
"""
CRASH = r"""
import os
os.write(2, b'Traceback:\n  last words\n')
os.write(2, b'{"event":"whole"}\n')
os.abort()
"""
WORKERS = """
from forebay.base.confined import ConfinedProcess, Limits, NoAnswer
from forebay.base.relay import relaying

with relaying("server"):
    limits = Limits(cpu_s=30.0, memory_bytes=1 << 30, answer_bytes=1 << 20)
    for module in ("forebay.text.template_worker", "forebay.grammar.check_worker"):
        try:
            ConfinedProcess(module, limits, "work").exchange(b"?", 60.0)
        except NoAnswer:
            pass
"""


def formatted(message: object, *, level: int = logging.INFO, error: BaseException | None = None) -> dict[str, Any]:
    trace = None if error is None else (type(error), error, error.__traceback__)
    record = logging.LogRecord("forebay.server", level, "file", 1, message, (), trace)
    line = JsonFormatter("server").format(record)
    assert "\n" not in line
    found: dict[str, Any] = json.loads(line)
    return found


def test_event_as_json_keeps_types_and_names_the_request() -> None:
    found = formatted(event("finished", id="9f", tokens=3, rate=1.23456, over=float("inf"), cut=True, no=None))
    assert found.pop("ts").endswith("Z")
    assert found == {
        "level": "info", "process": "server", "event": "finished", "request_id": "9f",
        "tokens": 3, "rate": 1.235, "over": "inf", "cut": True, "no": None,
    }  # fmt: skip


def test_event_as_json_says_no_more_than_its_text() -> None:
    found = formatted(event("x", why="secret" * 100, lines="a\nb"))
    assert found["why"] == ("secret" * 100)[:200]
    assert found["lines"] == "a?b"
    assert json.dumps(found["why"]).strip('"') in str(event("x", why="secret" * 100))


def test_event_with_an_exception_has_the_traceback_as_one_field() -> None:
    try:
        raise ValueError("bad")
    except ValueError as error:
        found = formatted(event("failed"), level=logging.ERROR, error=error)
    assert found["level"] == "error"
    assert found["traceback"].startswith("Traceback")
    assert found["traceback"].endswith("ValueError: bad")


def test_line_of_a_library_is_a_message_with_its_logger() -> None:
    found = formatted("plain words")
    assert (found["event"], found["logger"], found["text"]) == ("message", "forebay.server", "plain words")


def test_time_is_written_as_rfc_3339_with_milliseconds() -> None:
    assert rfc3339(1.25) == "1970-01-01T00:00:01.250Z"


@pytest.fixture(scope="module")
def output() -> tuple[list[dict[str, Any]], str]:
    """The objects that the program wrote to standard error, and its standard output."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, CRASH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stderr.splitlines()], done.stdout


def test_relay_turns_everything_that_is_written_into_objects(output: tuple[list[dict[str, Any]], str]) -> None:
    lines, stdout = output
    assert stdout == "plain again\n"
    by_event = {line["event"]: line for line in lines}
    assert by_event["first"]["number"] == 1
    assert by_event["note"]["text"] == "a note"
    texts = [line["text"] for line in lines if line["event"] in ("message", "output")]
    assert "two\nlines" in texts
    assert any("old" in text for text in texts)
    assert any("printed" in text for text in texts)
    assert any("from C, without an end" in text for text in texts)
    assert by_event["uncaught"]["thread"] == "divider"
    assert "ZeroDivisionError" in by_event["uncaught"]["traceback"]


def test_relay_keeps_the_last_words_of_a_child_that_crashes(output: tuple[list[dict[str, Any]], str]) -> None:
    lines, _ = output
    (words,) = [line for line in lines if line.get("process") == "engine"]
    assert words["text"] == "Traceback:\n  last words"
    assert {"event": "whole"} in lines


def test_relay_has_what_workers_of_templates_and_grammars_write() -> None:
    done = subprocess.run([sys.executable, "-c", WORKERS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    written = {line["process"]: line["text"] for line in map(json.loads, done.stderr.splitlines())}
    assert {*written} == {"template_worker", "check_worker"}
    assert all("Traceback" in text and "msgspec" in text for text in written.values())
