"""Recorded plans on a small random model, in memory whose free parts are poisoned: `forebay replay FILE --on tiny`.

The likeliest token at each position, and its log-probability, is compared to the bit with each request computed alone:
by another scheduler, without drafts, in memory that is cleared before. The last one is also computed in one step with
all before it. A difference is a fault of what decided the plans, since the kernels give the same bits in every batch
(C28). Adapters are left out of both.

Copies between the device and tiers of the prefix cache are made as planned. The other engine of one with a role is a
request that is computed alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from forebay.backends import make_ops
from forebay.base.errors import ConfigError
from forebay.config.engine_config import Ledger
from forebay.engine.recorder.alone import Alone
from forebay.engine.recorder.replay import NotExecuted, Outcome, Replay
from forebay.engine.recorder.small_engine import POISON, UNKNOWN, Chosen, Forced, SmallEngine, small_model
from forebay.engine.recorder.small_transfers import FirstToken, SentPrompt, SmallTransfers, request_of
from forebay.memory.kv_allocator import KV
from forebay.memory.radix_node import TOKEN_BYTES
from forebay.memory.slots import FREE, NO_IDS, Ids, Slots
from forebay.memory.tier import DEVICE
from forebay.requests.step_plan import HostCopy, StepPlan, TierCopy
from forebay.scheduler.journal import Added, Committed, HaltPlanning, Origin, Planning, Record, Reweighed, Transferred


class Compared(NamedTuple):
    """A position of a request, counted from its first token, with what is chosen there by the recorded plans, in this
    step, and for the request alone. If `is_sent`, a request alone goes on from what this step and those before sent."""

    step: int
    request: int
    position: int
    recorded: Chosen
    alone: Chosen
    is_sent: bool = False

    @property
    def is_fault(self) -> bool:
        """Whether the choices differ. Two that are not numbers are no proof of the same."""
        return self.recorded != self.alone or self.alone == UNKNOWN


class Executed(NamedTuple):
    """The outcome of a replay whose plans were executed: how many choices were compared, and the first that differs.
    `error` says why a plan could not be executed, "" if all could."""

    outcome: Outcome
    error: str
    num_compared: int
    num_requests: int
    fault: Compared | None


class Execution:
    """Executes the plans of one replay, and its transfers. Poisons what is freed."""

    def __init__(self, engine: SmallEngine, replay: Replay, transfers: SmallTransfers) -> None:
        self._engine, self._records, self._scheduler = engine, replay.records, replay.scheduler
        self._transfers = transfers
        self._committed = {record.step: record for record in replay.records if isinstance(record, Committed)}
        self._free: dict[tuple[str, str], np.ndarray[tuple[int], np.dtype[np.bool_]]] = {}
        self._step = 0
        self.chosen: dict[tuple[int, int], tuple[int, Chosen]] = {}  # by request and position, with the step
        self.forced: dict[tuple[int, int], int] = {}
        self.sent: list[Compared] = []

    def run(self, replay: Replay) -> str:
        """Run the replay. Return why a plan or a transfer could not be executed, "" if all could."""
        replay.execute, replay.observe = self.execute, self.observe
        try:
            replay.run()
        except NotExecuted as error:
            return f"{error} ({type(error.__cause__).__name__})"
        return ""

    def execute(self, plan: StepPlan) -> None:
        """Poison what was freed since the last plan, execute this one, and give its rows the recorded tokens."""
        self._poison([plan.host.saves, plan.host.stores])
        recorded = self._committed.get(plan.step)
        forced = None if recorded is None else Forced.of(recorded)
        self._step, sampled = plan.step, [*self._engine.run(plan, forced)]
        ids = self._scheduler.pools.table.request_id
        for (row, length, choice), token in zip(sampled, forced.tokens if forced and sampled else (), strict=True):
            at = int(ids[row]), length
            self.chosen[at], self.forced[at] = (plan.step, choice), token

    def observe(self, number: int) -> None:
        """Execute what happens before the scheduler gets this record."""
        record = self._records[number]
        try:
            if isinstance(record, Transferred):
                self._transfer(record)
            elif isinstance(record, Reweighed):
                self._forget()
        except Exception as error:
            raise NotExecuted(f"record {number}, behind step {self._step}: {error}") from error

    def _transfer(self, record: Transferred) -> None:
        """Poison what was freed since the last plan, and execute the transfer."""
        draft = self._scheduler.pools.draft
        self._poison([draft.saves, draft.stores])
        match self._transfers.before(record.event):
            case FirstToken(request, position, token):
                self.forced[request, position] = token
            case SentPrompt() as sent:
                self.sent.append(Compared(self._step, *sent, is_sent=True))
            case None:
                pass

    def _forget(self) -> None:
        """Forget the tokens of living requests, which begin again with other weights."""
        living = self._scheduler.requests
        self.chosen = {at: chosen for at, chosen in self.chosen.items() if at[0] not in living}
        self.forced = {at: token for at, token in self.forced.items() if at[0] not in living}

    def _poison(self, pending: Sequence[Sequence[HostCopy | TierCopy]]) -> None:
        """Poison what was freed since the last call, here and in tiers, but for slots that are yet to be copied."""
        pools, copied = self._scheduler.pools, [copy.slots for copies in pending for copy in copies]
        for name, slots in ((KV, pools.kv), *((kind.name, kind.slots) for kind in pools.kinds)):
            kept = [by_kind[name] for by_kind in copied if name in by_kind]
            freed = self._freed(DEVICE, name, slots, np.concatenate([NO_IDS, *kept]))
            if len(freed) and name in self._engine.runner.cache.tables:
                self._engine.fill(name, freed, POISON)
        for tier in self._scheduler.memory.tiers.all:
            for name, slots in ((KV, tier.kv), *((name, part.in_tree.slots) for name, part in tier.parts.items())):
                self._engine.tiers[tier.name].drop(name, self._freed(tier.name, name, slots, NO_IDS))

    def _freed(self, tier: str, name: str, slots: Slots, kept: Ids) -> Ids:
        """Return the slots that are free, were not at the last call, and are none of `kept`; at the first, all."""
        free = slots.owner <= FREE
        free[kept] = False
        before = self._free.get((tier, name))
        self._free[tier, name] = free
        return np.arange(1, slots.num_rows) if before is None else np.flatnonzero(free & ~before)


def run_on_tiny(origin: Origin, records: Sequence[Record], model_type: str) -> Executed:
    """Replay with a small model of this type. Raises ConfigError for an engine that it cannot stand for."""
    if origin.state:
        raise ConfigError(f"the recorded engine began with {origin.state}, whose content no record has: nothing is run")
    config, ops = replace(origin.config, ledger=Ledger.COUNT), make_ops("native", 1)
    with tempfile.TemporaryDirectory() as folder:
        model = small_model(Path(folder), model_type, config, ops)
    added = {record.id: record for record in records if isinstance(record, Added)}
    longest = max((len(request.tokens) // TOKEN_BYTES for request in added.values()), default=0) + 1
    replay = Replay(origin=msgspec.structs.replace(origin, config=config), records=records)
    engine = SmallEngine(model, ops, config, _width(records), _lost(records))
    transfers = SmallTransfers(replay.scheduler, engine, Alone(model, ops, config, longest), added)
    recorded = Execution(engine, replay, transfers)
    failure = recorded.run(replay)
    alone = Alone(model, ops, config, max((length for _, length in recorded.chosen), default=1))
    pairs = [*recorded.sent]
    for request in added.values():
        pairs += _pairs(alone, recorded, request)
    faults = [pair for pair in pairs if pair.is_fault]
    fault = min(faults, key=lambda fault: fault.step, default=None)
    return Executed(replay.outcome, failure, len(pairs), len({pair.request for pair in pairs}), fault)


def _width(records: Sequence[Record]) -> int:
    """Return the most tokens of one sequence that a step decodes."""
    return max((record.width for record in records if isinstance(record, Planning | HaltPlanning)), default=1)


def _lost(records: Sequence[Record]) -> set[int]:
    """Return the numbers of the copies of tiers that failed."""
    return {number for record in records if isinstance(record, Committed) for number in record.lost}


def _pairs(alone: Alone, recorded: Execution, added: Added) -> Iterator[Compared]:
    """Yield each choice of a request beside that of the request alone."""
    prompt, pictures = request_of(added)
    outputs = list[int]()
    while (token := recorded.forced.get((added.id, len(prompt) + len(outputs)))) is not None:
        outputs.append(token)
    choices = alone.choices(prompt, outputs, pictures) if outputs else {}
    for position, choice in choices.items():
        if found := recorded.chosen.get((added.id, position)):  # the other engine chose the first of some
            step, other = found
            yield Compared(step, added.id, position, other, choice)
