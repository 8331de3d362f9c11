"""The messages that the troubleshooting page quotes are the program's, and so are its codes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from types import CodeType

from forebay.memory.miss_reason import MissReason
from scripts.site import errors
from scripts.site.pages import DOCS, ROOT

PAGE = (DOCS / "guide" / "troubleshooting.md").read_text()


def texts() -> str:
    """Every string of the compiled package, and every part of one between what is put in."""
    paths = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in (ROOT / "forebay").rglob("*.py")}
    codes = [SourceFileLoader(name, str(path)).get_code(name) for path, name in paths.items()]
    return "\n".join(text for code in codes if code is not None for text in constants(code))


def constants(code: CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from constants(constant)
        elif isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple):
            yield from (part for part in constant if isinstance(part, str))


def quoted() -> list[str]:
    """The parts between the gaps of every message of the first table."""
    table = PAGE.partition("## It does not start")[2].partition("\n## ")[0]
    messages = [
        message for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for message in row.split("`")[1::2]
    ]
    assert len(messages) >= 8
    return [part.strip() for message in messages for part in re.split(r"\.\.\.|'X'|\bX\b|\bN\b|\bM\b|'x'", message)]


def test_quoted_messages_are_the_programs() -> None:
    known = texts()
    assert [part for part in quoted() if len(part) > 2 and part not in known] == []


def test_quoted_codes_are_codes() -> None:
    table = PAGE.partition("## A request is refused")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d{3}) ((?:`\w+`(?:, )?)+)", table, re.MULTILINE)
    told = {(error.status, error.code) for error in errors.every()}
    quoted_codes = {(int(status), code) for status, codes in rows for code in re.findall(r"\w+", codes)}
    assert len(quoted_codes) >= 15
    assert quoted_codes - told == set()


def test_every_reason_of_a_miss_is_explained() -> None:
    table = (DOCS / "guide" / "cache.md").read_text().partition("| reason |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(MissReason)
