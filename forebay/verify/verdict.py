"""Verdicts on circumstances, and what both verifications, of an engine and of a server, do with them."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

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


def first_error(failure: ForebayError | ExceptionGroup[Exception]) -> ForebayError:
    """Return the first error of a request in a group of failures. Raises a failure that is not of a request."""
    while isinstance(failure, ExceptionGroup):
        found, others = failure.split(ForebayError)
        if found is None:
            raise others or failure
        failure = found.exceptions[0]
    return failure
