"""Rules of the text part of models with images; see `tests.mutants`."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

OUTER: Final[tuple[Mutant, ...]] = ()
