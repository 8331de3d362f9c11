"""Rules of dense families; see `tests.mutants`."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

DENSE: Final[tuple[Mutant, ...]] = ()
