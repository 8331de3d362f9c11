"""The servers and routers of a cluster, as actors: started, waited for, drained and ended. There is no controller: the
desired state is the list of named actors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import msgspec

from forebay.base.errors import ConfigError, EngineError, Unavailable
from forebay.cluster.messages import Needs, Phase, Spec, Status, Update, Updated
from forebay.cluster.placement import Node, place, units_of
from forebay.cluster.rays import Outcome, Rays, remember_update

POLL_S: Final = 0.3
DRAIN_MARGIN_S: Final = 30.0
UPDATE_TIMEOUT_S: Final = 3700.0
ASK_TIMEOUT_S: Final = 5.0

Report = Callable[[str], None]


def _status_of(name: str, outcome: Outcome) -> Status | None:
    """Return the status of a replica, None if it did not answer. Raises EngineError for one that cannot be started."""
    if outcome.is_dead:
        raise EngineError(f"{name} cannot be started: {outcome.error}")
    if outcome.error:
        return None
    status = msgspec.msgpack.decode(outcome.value, type=Status)
    if status.phase is Phase.REFUSED:
        raise EngineError(f"{name} cannot be started on {status.hostname}: {status.why}")
    return status


class Group:
    """All actors of one Ray cluster. `report` prints a line of progress."""

    def __init__(self, rays: Rays, report: Report) -> None:
        self.rays, self._report = rays, report

    def statuses(self, names: Iterable[str] | None = None) -> dict[str, Status | str]:
        """Return the state of each actor, or why it does not answer."""
        asked = self.rays.actors() if names is None else list(names)
        outcomes = self.rays.call_all(asked, "status", timeout_s=ASK_TIMEOUT_S)
        return {
            name: outcomes[name].error or msgspec.msgpack.decode(outcomes[name].value, type=Status) for name in asked
        }

    def specs(self) -> list[Spec]:
        """Return what all actors run. Raises Unavailable if one does not answer, ConfigError if there is none."""
        names = self.rays.actors()
        if not names:
            raise ConfigError("no servers run on this cluster: start some with forebay cluster up")
        outcomes = self.rays.call_all(names, "spec")
        return [msgspec.msgpack.decode(outcomes[name].answer(), type=Spec) for name in names]

    def start_servers(self, specs: Sequence[Spec], *, in_pairs: bool, nodes: Sequence[Node]) -> list[Spec]:
        """Place servers and create their actors. Raises Unavailable, with nothing started, if there is no room."""
        units = units_of(specs, in_pairs=in_pairs)
        placed = place(units, nodes)
        started: list[Spec] = []
        for unit, chosen in zip(units, placed, strict=True):
            if unit[0].group:
                self.rays.reserve_pair(unit)
            for spec, node in zip(unit, chosen, strict=True):
                self.rays.create(spec, node.id)
                self._report(f"{spec.name} on {node.hostname} ({node.address}): {_needs_text(spec.needs)}")
                started.append(spec)
        return started

    def wait_ready(self, names: Sequence[str], timeout_s: float) -> dict[str, Status]:
        """Wait until all are ready. Raises EngineError with the reason if one cannot be served or the time is over."""
        end, ready = time.monotonic() + timeout_s, dict[str, Status]()
        while len(ready) < len(names):
            waiting = [name for name in names if name not in ready]
            outcomes = self.rays.call_all(waiting, "status", timeout_s=ASK_TIMEOUT_S)
            why = ""
            for name, outcome in outcomes.items():
                status = _status_of(name, outcome)
                if status is not None and status.phase is Phase.READY:
                    ready[name] = status
                    self._report(f"{name} is ready at {status.url}")
                else:
                    why = outcome.error if status is None else status.why
            if time.monotonic() > end:
                raise EngineError(
                    f"{', '.join(waiting)} not ready after {timeout_s:g} s ({why or 'still starting'}): see forebay "
                    "cluster logs, or give --ready-timeout"
                )
            if len(ready) < len(names):
                time.sleep(POLL_S)
        return ready

    def drain(self, specs: Sequence[Spec]) -> None:
        """Drain servers all at once, and then end their actors. A server that does not answer is ended."""
        if not specs:
            return
        longest = max(spec.drain_timeout_s for spec in specs) + DRAIN_MARGIN_S
        outcomes = self.rays.call_all([spec.name for spec in specs], "drain", timeout_s=longest)
        for spec in specs:
            error = outcomes[spec.name].error
            self._report(f"{spec.name} {f'was ended without a drain: {error}' if error else 'has drained'}")
        self.end(specs)

    def end(self, specs: Sequence[Spec]) -> None:
        """End actors, and free the room of pairs of which nothing is left."""
        for spec in specs:
            self.rays.end(spec)
        ended = {spec.name for spec in specs}
        groups = {spec.group for spec in specs if spec.group}
        kept = [name for name in self.rays.actors() if name not in ended]
        outcomes = self.rays.call_all(kept, "spec") if groups else {}
        used = {
            msgspec.msgpack.decode(outcome.value, type=Spec).group for outcome in outcomes.values() if not outcome.error
        }
        for group in groups - used:
            self.rays.release(group)

    def update_weights(self, spec: Spec, path: str, before: Update | None) -> None:
        """Have one server load other weights of the same model. Raises EngineError with its reason."""
        update = Update(path=path, num_updates=(before.num_updates if before else 0) + 1)
        found = self.rays.call(spec.name, "update_weights", update.encode(), timeout_s=UPDATE_TIMEOUT_S)
        answer = msgspec.msgpack.decode(found, type=Updated)
        if answer.problem:
            raise EngineError(f"{spec.name} has not updated its weights: {answer.problem}")
        remember_update(spec.name, update)
        self._report(f"{spec.name} has the weights of {path}, version {answer.status.weight_version}")


def answered(statuses: Mapping[str, Status | str], name: str) -> Status:
    """Return the state of an actor. Raises Unavailable if it has not answered."""
    status = statuses[name]
    if isinstance(status, str):
        raise Unavailable(f"{name}: {status}")
    return status


def _needs_text(needs: Needs) -> str:
    gpus = f", {needs.num_gpus:g} GPU" if needs.num_gpus else ""
    return f"{needs.num_cpus:g} CPU, {needs.memory_bytes / (1 << 30):.2f} GiB{gpus}"
