"""Rules of families with LayerNorm, capped scores or windows of their own; see `tests.mutants`."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

NORMS: Final[tuple[Mutant, ...]] = ()
