"""Rules of families with experts; see `tests.mutants`."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

EXPERTS: Final[tuple[Mutant, ...]] = ()
