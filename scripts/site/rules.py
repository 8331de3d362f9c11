"""The rules of each contract with their tests, from the mutants that remove them."""

from __future__ import annotations

from tests.mutants import MUTANTS
from tests.mutants.contracts import rules


def page() -> str:
    """Return a heading and a table for each contract."""
    return rules(MUTANTS)
