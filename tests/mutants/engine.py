"""Rules of `engine/`."""

from tests.mutants.mutant import Mutant

ENGINE: tuple[Mutant, ...] = ()
