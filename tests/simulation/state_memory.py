"""Recurrent states on the hash model's device, and beside each the number of tokens that it has consumed.

Shape letters: S sequences in the step, T tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from forebay.base.parts import I64, Mask
from forebay.memory.slots import CACHE, PAD, Slots
from forebay.requests.step_plan import StepPlan
from tests.simulation.device_memory import POISON, RunnerError, SlotBytes, Touched, check_ids, check_unique, some
from tests.simulation.hashing import U64, scan
from tests.simulation.row_lengths import Span

if TYPE_CHECKING:
    from tests.simulation.hash_step import HashStep

NO_LEN: Final = -1


class StateMemory:
    """One word per slot. Changes by plans only, when a step's turn comes."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.bytes = SlotBytes(slots)
        self.states = self.bytes.words
        self.lens = np.full(slots.num_rows, NO_LEN, dtype=np.int64)

    # -- launching ------------------------------------------------------------------------------------------------

    def launch(self, plan: StepPlan, span: Span, admitted: Mask) -> Touched:
        """Check the step's slots and whose they are. `admitted` [S]: sequences whose request came in with this step."""
        work, tenants = plan.kinds.state, span.tenants
        live, snaps = work.state_slots, work.snap_slots
        if len(live) != plan.num_seqs:
            raise RunnerError(f"step {plan.step} has {plan.num_seqs} sequences and state slots {live}")
        check_ids(self.slots, "state slots", live)
        if len(snaps):
            self._check_snapshots(plan, span)
        used, users = np.concatenate([live, snaps]), np.concatenate([tenants, tenants[work.snap_seqs]])
        check_unique("a state slot", used)
        if some(self.slots.owner[used] != users):
            raise RunnerError(f"step {plan.step} writes state slots {used} that are not its requests' {users}")
        if len(work.clears) or len(work.copy_dst) or plan.host.loads or some(admitted):
            self._check_beginnings(plan, tenants, admitted)
        dst = work.copy_dst
        written = np.concatenate([used, dst]) if len(dst) else used
        writers = np.concatenate([users, self.slots.owner[dst]]) if len(dst) else users
        return Touched(self.slots, "state slots", written, writers, work.copy_src)

    def _check_snapshots(self, plan: StepPlan, span: Span) -> None:
        work = plan.kinds.state
        seqs, lens = work.snap_seqs, work.snap_lens
        check_ids(self.slots, "snapshot slots", work.snap_slots)
        if list(zip(seqs, lens, strict=True)) != sorted(zip(seqs, lens, strict=True)):
            raise RunnerError(f"step {plan.step}: snapshots out of order: {seqs} {lens}")
        if some(lens > span.ends[seqs]) or some(lens <= span.least[seqs]):
            raise RunnerError(f"step {plan.step}: snapshots at {lens} outside of what its sequences compute")
        check_unique("a snapshot of a decode", seqs[span.decodes[seqs]])

    def _check_beginnings(self, plan: StepPlan, tenants: I64, admitted: Mask) -> None:
        """Each new request's slot becomes zeros, a copy, or what is loaded from the host; exactly one of these, and
        nobody else's does."""
        work = plan.kinds.state
        loaded = [slot for load in plan.host.loads for slot in load.slots["state"].tolist()]
        src, dst, owner = work.copy_src, work.copy_dst, self.slots.owner
        for what, ids in (("cleared slots", work.clears), ("copied slots", src), ("slots copied to", dst)):
            check_ids(self.slots, what, ids)
        begun = [*work.clears.tolist(), *dst.tolist(), *loaded]
        if len(set(begun)) != len(begun) or set(begun) & set(src.tolist()):
            what = f"clears {work.clears}, copies {src} to {dst} and loads {plan.host.loads}"
            raise RunnerError(f"step {plan.step} {what}: one slot twice")
        new = set(work.state_slots[admitted].tolist())
        if new - set(begun):
            raise RunnerError(f"step {plan.step}: slots {new - set(begun)} hold what their last tenant left")
        # Without an extra buffer a running request's state is copied to a slot of its own.
        others = set(begun) - new
        if others - set(dst.tolist()) or others & set(work.state_slots.tolist()):
            raise RunnerError(f"step {plan.step} overwrites the slots {others} of requests under way")
        of = owner[dst]
        if not set(of.tolist()) <= set(tenants.tolist()):
            raise RunnerError(f"step {plan.step} copies to slots {dst} of {of}, who are not in it")
        if ((owner[src] != CACHE) & (owner[src] != of)).any():
            raise RunnerError(f"step {plan.step} copies slots {src} of {owner[src]} for {of}")

    # -- executing ------------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """Clears, then copies."""
        work = plan.kinds.state
        self.states[work.clears] = 0
        self.lens[work.clears] = 0
        self.states[work.copy_dst] = self.states[work.copy_src]
        self.lens[work.copy_dst] = self.lens[work.copy_src]

    def put(self, slot: int, state: np.uint64, length: int) -> None:
        """What was saved on the host comes back."""
        self.states[slot], self.lens[slot] = state, length

    def bad(self, plan: StepPlan, starts: I64) -> Mask:
        """Sequences whose state is poison or has consumed another number of tokens than came before. [S]"""
        live = plan.kinds.state.state_slots
        bad: Mask = (self.lens[live] != starts) | (self.states[live] == POISON)
        return bad

    def scan(self, plan: StepPlan, keys: U64, inside: I64, which: I64) -> U64:
        """The state after each of the step's tokens [T]; see `hashing.scan`."""
        return scan(keys, self.states[plan.kinds.state.state_slots], inside, which, np.cumsum(plan.q_lens))

    def advance(self, step: HashStep, accepted: I64) -> None:
        """Of each sequence `accepted` tokens [S] count: its state is that behind them, and of its snapshots those are
        taken that lie within them."""
        work, starts = step.plan.kinds.state, step.starts
        live, seqs = work.state_slots, work.snap_seqs
        self.states[live] = step.states[step.firsts + accepted - 1]
        self.lens[live] = starts + accepted
        if len(seqs):
            inside = work.snap_lens - starts[seqs]
            taken = (inside > 0) & (inside <= accepted[seqs])
            snaps = work.snap_slots[taken]
            self.states[snaps] = step.states[(step.firsts[seqs] + inside - 1)[taken]]
            self.lens[snaps] = work.snap_lens[taken]
        self.states[PAD], self.lens[PAD] = POISON, NO_LEN

    def spoil(self, step: HashStep, seqs: I64) -> None:
        """Of these sequences the step did not complete, or went wrong: garbage in whatever it may have written."""
        work = step.plan.kinds.state
        mine = np.isin(work.snap_seqs, seqs) & (work.snap_lens > step.starts[work.snap_seqs])
        self.spoil_slots(np.append(work.snap_slots[mine], work.state_slots[seqs]))

    def spoil_slots(self, slots: I64) -> None:
        self.states[slots], self.lens[slots] = POISON, NO_LEN
