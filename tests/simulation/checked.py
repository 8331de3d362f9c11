"""Self-checks of the prefix cache under random traffic, faults and losses, on the device and in tiers (C19, C30).

python -m tests.simulation.checked --seed 1234             replay one seed
python -m tests.simulation.checked --seeds 0:5000 --jobs 2
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any, ClassVar

import numpy as np

from forebay.engine.loop.cache_checks import CHECK_ID, CacheChecks, Differing
from forebay.engine.loop.core import stop_check
from forebay.memory.slots import Ids
from forebay.memory.tier import DEVICE
from forebay.requests.request import Request
from forebay.requests.step_plan import StepPlan, StepResult
from forebay.requests.updates import Update
from forebay.scheduler.checked_prefixes import CHECK
from tests.simulation.command_line import command_line
from tests.simulation.event_log import Outcome
from tests.simulation.hashing import U64
from tests.simulation.liveness import Liveness, require
from tests.simulation.oracles import Oracles, namespace_of
from tests.simulation.simulator import Simulation, run_seed

INTERVAL_S = 0.02  # between two checks


@dataclass(frozen=True)
class CheckOutcome(Outcome):
    """`checks` entries were compared, and `stopped` checks ended because a request came."""

    checks: int = 0
    stopped: int = 0


class CheckOracles(Oracles):
    """While a check computes, its namespace has the salt of the entry, and no client is concerned."""

    check_salt = 0

    def salt(self, namespace: str) -> int:
        return self.check_salt if namespace.endswith(f"/{CHECK}") else super().salt(namespace)


class CheckSimulation(Simulation):
    """Checks entries whenever the core is idle for a tick; requests come at any moment of a check."""

    make_oracles: ClassVar[type[Oracles]] = CheckOracles

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.liveness: Liveness | None = self.scheduler.liveness
        self.num_stopped = 0
        self.interrupts = Random(f"{self.config} interrupts")

    def _other_parts(self) -> dict[str, Any]:
        self.checks = CacheChecks(
            self.scheduler, self._compare, per_minute=60.0 / INTERVAL_S, now=0.0, rng=Random(f"{self.config} checks")
        )
        return {"checks": self.checks}

    # -- comparing ----------------------------------------------------------------------------------------------------

    def _compare(self, tier: str, there: Mapping[str, Ids], here: Mapping[str, Ids]) -> Differing | None:
        """Compare words as a mover compares bytes; a tier behind the device may lose what it had."""
        require(not self.flights, "a check compares while a step is in flight")
        if tier != DEVICE and self.runner.cache_tiers.loses():
            return None
        ours = self._words(DEVICE, here)
        return {kind: (words != ours[kind]).any(axis=1) for kind, words in self._words(tier, there).items()}

    def _words(self, tier: str, slots: Mapping[str, Ids]) -> dict[str, U64]:
        runner = self.runner
        if tier != DEVICE:
            words = runner.cache_tiers.tiers[tier]
            kv, windows, states, lens = words.kv, words.windows, words.states, words.lens.astype(np.uint64)
        else:
            kv = runner.pages.by_slot
            windows = runner.windows.bytes.by_slot if runner.windows else kv
            states = runner.states.states if runner.states else kv[:, 0]
            lens = runner.states.lens.astype(np.uint64) if runner.states else kv[:, 0]
        both = np.stack([states, lens], axis=1)
        full = kv if runner.model.full else np.zeros_like(kv)
        return {kind: {"kv": full, "window": windows, "state": both}[kind][ids] for kind, ids in slots.items()}

    # -- the loop -----------------------------------------------------------------------------------------------------

    def _submit(self, req: Request, pictures: Any = ()) -> Any:
        self.num_stopped += self.checks.busy
        told = super()._submit(req, pictures)
        require(not self.checks.busy, "a request has come and the check goes on")
        self._follow()
        return told

    def tick(self) -> bool:
        if not self.scheduler.requests and self.scheduler.idle and not self.flights and not self.scheduler.flushing:
            self.checks.turn(self.now)
            self._follow()
        faults = self.faults
        if self.checks.busy and self.interrupts.random() < max(faults.flush, faults.windows_lost):
            stop_check(self.core)  # as before anything that a client asks for
            self._follow()
        if self.checks.busy:
            self.faults = replace(faults, flush=0.0, windows_lost=0.0)
        done = super().tick()
        self.faults = faults
        return done

    def _follow(self) -> None:
        """Take the request of a check for nobody's: who looks at clients does not look while it is computed."""
        entry = self.checks._entry
        self.scheduler.liveness = None if entry else self.liveness
        if entry and CHECK_ID in self.scheduler.requests:
            req = self.scheduler.requests[CHECK_ID]
            salt = self.oracles.salt(namespace_of(entry.like))
            self.salts[CHECK_ID] = self.oracles.check_salt = salt  # type: ignore[attr-defined]
            self.references.add(CHECK_ID, req.tokens.tolist(), req.params, salt=salt, rows=self._rows(()))

    def _turn(self) -> None:
        super()._turn()
        self._follow()

    def _heard(self, updates: list[Update]) -> None:
        require(all(update.request_id != CHECK_ID for update in updates), "a client hears of a check")
        super()._heard(updates)

    def planned(self, plan: StepPlan | None, width: int) -> None:
        if self.checks.computing:
            self._launched(plan)
        else:
            super().planned(plan, width)

    @property
    def _lands_check(self) -> bool:
        """Whether the step that lands is one of a check, which may have ended since."""
        assert self.device.landed is not None, "no step lands"
        return CHECK_ID in self.device.landed.tenants

    def committing(self, plan: StepPlan, result: StepResult) -> None:
        if not self._lands_check:
            super().committing(plan, result)

    def committed(self, plan: StepPlan, result: StepResult) -> None:
        if self._lands_check:
            self.device.num_failures = 0
        else:
            super().committed(plan, result)

    def expire(self, run: Callable[[], None]) -> None:
        if self.checks.computing:
            run()
        else:
            super().expire(run)

    def drain(self) -> int:
        stop_check(self.core)
        self._follow()
        self.checks._due_at = float("inf")
        return super().drain()

    def outcome(self) -> CheckOutcome:
        """No entry may differ: nothing was spoilt."""
        counters = self.scheduler.memory.tiers.counters
        found = {name: count for name, count in counters.items() if name.startswith("cache_divergence") and count}
        require(not found, f"checks found {found}")
        plain = super().outcome()
        same = {each.name: getattr(plain, each.name) for each in fields(plain)}
        return CheckOutcome(**same, checks=int(counters["cache_checks"]), stopped=self.num_stopped)


def run_checked(seed: int) -> CheckOutcome:
    """Run a seed with checks: two in three have tiers, one in two has prefixes that clients want kept."""
    outcome = run_seed(seed, tiers=seed % 3 > 0, keeping=seed % 2 == 1, tenants=seed % 4 == 3, make=CheckSimulation)
    assert isinstance(outcome, CheckOutcome), "a simulation with checks counts them"
    return outcome


def main() -> int:
    return command_line("tests.simulation.checked", __doc__ or "", run_checked, CheckOutcome(seeds=0))


if __name__ == "__main__":
    sys.exit(main())
