"""Verdicts on circumstances, and what both verifications, of an engine and of a server, do with them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Final, Protocol

from forebay.base.errors import ForebayError


class Verdict(StrEnum):
    """The result of one circumstance, compared with the answers of requests that ran alone."""

    SAME = "same"
    DIFFERENT = "different"
    FAILED = "failed"  # a request did
    NOT_SHOWN = "not shown"  # the same, but nothing proves that it came about for each kind of request
    LEFT_OUT = "left out"  # it cannot be set up, or no time was left for it


STYLES: Final = {
    Verdict.SAME: "green",
    Verdict.NOT_SHOWN: "yellow",
    Verdict.DIFFERENT: "bold red",
    Verdict.FAILED: "bold red",
}


EXIT_DIFFERENT: Final = 1  # or a request failed
EXIT_TOO_FEW: Final = 2  # circumstances were shown

COLUMNS: Final = 80
VERDICT_COLUMNS: Final = 10
_NAME_COLUMNS: Final = 32
_MAX_SHOWN: Final = 3  # differences of a circumstance


def table_lines(verdict: StrEnum, name: str, what: str, differences: Sequence[str]) -> Iterator[str]:
    """Yield the lines of one circumstance: its verdict, name and proof, then its first differences."""
    first = f"{verdict:<{VERDICT_COLUMNS}}{name:<{_NAME_COLUMNS}}"
    wrapper = textwrap.TextWrapper(COLUMNS - 1, first, " " * len(first), break_long_words=False, break_on_hyphens=False)
    yield from wrapper.wrap(what) or [first]
    indent = " " * VERDICT_COLUMNS
    yield from (f"{indent}{difference}" for difference in differences[:_MAX_SHOWN])
    if len(differences) > _MAX_SHOWN:
        yield f"{indent}and {len(differences) - _MAX_SHOWN} more"


class Judged(Protocol):
    """The outcome of one circumstance."""

    @property
    def verdict(self) -> Verdict: ...


def exit_code(outcomes: Sequence[Judged], at_least: int) -> int:
    """Return the exit code; a difference or a failure counts before too few circumstances."""
    found = [outcome.verdict for outcome in outcomes]
    if Verdict.DIFFERENT in found or Verdict.FAILED in found:
        return EXIT_DIFFERENT
    return EXIT_TOO_FEW if found.count(Verdict.SAME) < at_least else 0


def first_error(failure: ForebayError | ExceptionGroup[Exception]) -> ForebayError:
    """Return the first error of a request in a group of failures. Raises a failure that is not of a request."""
    while isinstance(failure, ExceptionGroup):
        found, others = failure.split(ForebayError)
        if found is None:
            raise others or failure
        failure = found.exceptions[0]
    return failure
