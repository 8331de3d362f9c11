"""Bugs on purpose, by name, and the search for a seed with which each is found."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

Patch = pytest.MonkeyPatch
Mutation = Callable[[Patch], None]


class Mutations(dict[str, Mutation]):
    """What `run(seed)`, which raises where something is wrong, must find."""

    def __init__(self, run: Callable[[int], object]) -> None:
        super().__init__()
        self._run = run

    def add(self, apply: Mutation) -> Mutation:
        self[apply.__name__] = apply
        return apply

    def found_after(self, name: str, seeds: Iterable[int]) -> int | None:
        """With the mutation in place, the first seed that fails; None if all pass.

        A mutation that no longer fits the code it changes proves nothing: such errors are raised.
        """
        with Patch.context() as patch:
            self[name](patch)
            for seed in seeds:
                try:
                    self._run(seed)
                except (TypeError, AttributeError, NameError):
                    raise
                except Exception:
                    return seed
        return None

    def report(self, num_seeds: int) -> int:
        """Print after how many seeds each is found, and the score; an exit code."""
        missed = 0
        for name in self:
            found = self.found_after(name, range(num_seeds))
            print(f"{name:<70} {'NOT FOUND' if found is None else f'seed {found}'}", flush=True)
            missed += found is None
        print(f"{len(self) - missed} of {len(self)} found within {num_seeds} seeds")
        return min(missed, 1)
