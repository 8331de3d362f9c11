"""Bugs on purpose in what is particular to hybrid models: states, windows, anchors, copies on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec import structs

from forebay.memory import anchors
from forebay.memory.kinds.state import recurrent
from forebay.memory.kinds.state.cached_states import CachedStates
from forebay.memory.kinds.state.hybrid_rows import MambaPool
from forebay.memory.kinds.state.recurrent import Snapshot, States, Tracking
from forebay.memory.kinds.window.cached_windows import CachedWindows, WindowMap
from forebay.memory.kinds.window.windows import Windows
from forebay.memory.slots import CACHE, NO_SLOT
from forebay.scheduler.admission import AdmissionPass
from forebay.scheduler.memory.allocator import Allocator
from forebay.scheduler.memory.host_copies import HostCopies
from forebay.scheduler.memory.pools import Pools

Patch = pytest.MonkeyPatch


# -- states -----------------------------------------------------------------------------------------------------------


def a_state_is_not_cleared_for_its_next_tenant(patch: Patch) -> None:
    patch.setattr(MambaPool, "clear_state", lambda self, slot, draft: None)


def a_state_is_cleared_although_it_is_copied_to(patch: Patch) -> None:
    begin = States._begin

    def mutated(self: Any, held: Any, draft: Any) -> Any:
        begin(self, held, draft)
        if held.pin.num_pages:
            self.pool.clear_state(self.tracking(held).live, draft)

    patch.setattr(States, "_begin", mutated)


def a_hit_begins_with_the_state_of_a_shorter_prefix(patch: Patch) -> None:
    copy_from = MambaPool.copy_from
    begin = States._begin

    def mutated(self: Any, held: Any, draft: Any) -> Any:
        begin(self, held, draft)
        above = held.pin.node.parent
        if held.pin.num_pages and self.in_tree.slot_of(above):
            draft.copies.clear()
            copy_from(self.pool, self.in_tree.slot_of(above), self.tracking(held).live, draft)

    patch.setattr(States, "_begin", mutated)


def a_copied_state_is_let_go_before_its_step_ran(patch: Patch) -> None:
    begin = States._begin

    def mutated(self: Any, held: Any, draft: Any) -> Any:
        begin(self, held, draft)
        while draft.reads:
            self.return_slots(draft.reads.pop(), held.id)

    patch.setattr(States, "_begin", mutated)


def a_state_is_evicted_while_it_is_locked(patch: Patch) -> None:
    patch.setattr(CachedStates, "lock", lambda self, node, pages: None)
    patch.setattr(CachedStates, "unlock", lambda self, node, pages: None)


def an_evicted_state_is_still_found(patch: Patch) -> None:
    drop = CachedStates._drop

    def mutated(self: Any, node: Any) -> Any:
        cached = self._at[node]
        drop(self, node)
        self._at[node] = cached

    patch.setattr(CachedStates, "_drop", mutated)


def splitting_an_edge_leaves_the_state_with_the_upper_part(patch: Patch) -> None:
    split = CachedStates.split

    def mutated(self: Any, upper: Any, lower: Any) -> Any:
        split(self, upper, lower)
        if lower in self._at:
            self._at[upper] = self._at.pop(lower)
            del self._ranks[self._at[upper].tenant][self._at[upper].rank][lower]
            self._below[lower] -= 1
            self._place(upper)

    patch.setattr(CachedStates, "split", mutated)


def a_state_slot_leaks(patch: Patch) -> None:
    release_all = States.release_all

    def mutated(self: Any, held: Any) -> Any:
        left = release_all(self, held)
        return left._replace(ids=left.ids[1:])

    patch.setattr(States, "release_all", mutated)


def a_donated_slot_is_freed_as_well(patch: Patch) -> None:
    release_all = States.release_all

    def mutated(self: Any, held: Any) -> Any:
        self.tracking(held).given = NO_SLOT
        return release_all(self, held)

    patch.setattr(States, "release_all", mutated)


def a_retracted_request_goes_on_with_whatever_its_slot_holds(patch: Patch) -> None:
    begin, admit = States._begin, Allocator.admit

    def mutated(self: Any, req: Any, *args: Any) -> Any:
        with Patch.context() as inside:
            inside.setattr(States, "_begin", (lambda self, held, draft: None) if req.num_retractions else begin)
            admit(self, req, *args)

    patch.setattr(Allocator, "admit", mutated)


# -- snapshots --------------------------------------------------------------------------------------------------------


def a_snapshot_is_adopted_before_its_step_committed(patch: Patch) -> None:
    complete = Tracking.complete
    patch.setattr(Tracking, "complete", lambda self, step, *args: complete(self, step + 1, *args))


def a_tracked_state_is_adopted_with_all_that_is_committed(patch: Patch) -> None:
    latest = States._latest

    def mutated(self: Any, held: Any, tracking: Any, num_committed: Any) -> Any:
        snapshot = latest(self, held, tracking, num_committed)
        page_size = self._config.page_size
        return snapshot and snapshot._replace(length=num_committed // page_size * page_size)

    patch.setattr(States, "_latest", mutated)


def a_live_state_is_donated_although_a_step_in_flight_takes_it_further(patch: Patch) -> None:
    latest = States._latest

    def mutated(self: Any, held: Any, tracking: Any, num_committed: Any) -> Any:
        page_size = self._config.page_size
        known = tracking.ready[-1].length if tracking.ready else held.pin.num_pages * page_size
        if num_committed % page_size == 0 and num_committed > known:
            return Snapshot(0, num_committed, tracking.live)
        return latest(self, held, tracking, num_committed)

    patch.setattr(States, "_latest", mutated)


def tracking_slots_do_not_take_turns(patch: Patch) -> None:
    patch.setattr(Tracking, "next_buffer", lambda self: self.buffers[0])
    patch.setattr(Tracking, "latest", property(lambda self: self.tracked))


def a_state_is_tracked_a_token_late(patch: Patch) -> None:
    reserve_snapshot = Tracking.reserve_snapshot

    def mutated(self: Any, step: Any, length: Any, **how: Any) -> Any:
        slot = reserve_snapshot(self, step, length, **how)
        if slot is not None:
            self.pending[-1] = Snapshot(step, length - 1, slot)
        return slot

    patch.setattr(Tracking, "reserve_snapshot", mutated)


def anchors_are_not_cut_to_whole_pages(patch: Patch) -> None:
    right = anchors.plan_anchors

    def mutated(*, page_size: Any, **asked: Any) -> Any:
        points = right(page_size=page_size, **asked)
        return [point._replace(length=point.length - 1) for point in points] if page_size > 1 else points

    patch.setattr(recurrent, "plan_anchors", mutated)


def chunks_run_past_the_anchors_of_live_states(patch: Patch) -> None:
    patch.setattr(States, "limit", lambda self, held, stop: stop)


# -- windows ----------------------------------------------------------------------------------------------------------


def a_window_page_is_freed_a_page_early(patch: Patch) -> None:
    first_kept = Windows.first_kept
    patch.setattr(Windows, "first_kept", lambda self, kv_len: first_kept(self, kv_len) + 1)


def a_window_moves_on_with_a_step_in_flight(patch: Patch) -> None:
    def mutated(self: Any, kv_len: Any) -> Any:
        return np.maximum(np.asarray(kv_len) - self.map.window + 2, 0) // self.map.page_size

    patch.setattr(Windows, "first_kept", mutated)


def a_window_with_a_hole_is_a_hit(patch: Patch) -> None:
    patch.setattr(CachedWindows, "last_resumable", lambda self, nodes, pages, longest: longest)


def the_windows_of_a_hit_are_not_locked(patch: Patch) -> None:
    patch.setattr(WindowMap, "lock", lambda self, pages: None)
    patch.setattr(WindowMap, "unlock", lambda self, pages: None)


def a_row_turns_to_cached_pages_that_have_lost_their_windows(patch: Patch) -> None:
    patch.setattr(CachedWindows, "replaced", lambda self, nodes, cached, own, owner: None)


def a_window_is_evicted_and_still_mapped(patch: Patch) -> None:
    def mutated(self: Any, pages: Any, most: Any) -> Any:
        free = pages[self.map.is_there(pages) & (self.map.locks[pages] == 0)][:most]
        self.num_cached -= len(free)
        self.slots.return_ids(self.map.full_to_window[free].astype(np.int64), CACHE)
        return len(free)

    patch.setattr(CachedWindows, "evict_from", mutated)


# -- copies on the host -----------------------------------------------------------------------------------------------


def the_copy_of_another_request_is_loaded(patch: Patch) -> None:
    load = HostCopies.load

    def mutated(self: Any, copy: Any, draft: Any) -> Any:
        load(self, copy, draft)
        others = [id for id, copy in self._copies.items() if copy.step < draft.step]
        if others:
            draft.loads[-1] = structs.replace(copy, request_id=others[0])

    patch.setattr(HostCopies, "load", mutated)


def a_copy_is_loaded_into_the_slot_of_the_last_tenant(patch: Patch) -> None:
    load = HostCopies.load

    def mutated(self: Any, copy: Any, draft: Any) -> Any:
        slots = {kind: ids - (kind == "state") for kind, ids in copy.slots.items()}
        load(self, structs.replace(copy, slots=slots), draft)

    patch.setattr(HostCopies, "load", mutated)


def what_has_not_come_back_from_the_host_is_adopted(patch: Patch) -> None:
    admit = Allocator.admit

    def mutated(self: Any, req: Any, *args: Any) -> Any:
        admit(self, req, *args)
        req.allocation.kv_committed = req.allocation.kv_bound

    patch.setattr(Allocator, "admit", mutated)


def a_copy_that_a_failed_step_was_to_make_is_relied_on(patch: Patch) -> None:
    patch.setattr(HostCopies, "start_over", lambda self, void, committed: [])


def a_copy_outlives_its_request(patch: Patch) -> None:
    def mutated(self: Any, request_id: Any, draft: Any) -> Any:
        self.num_bytes -= self._copies.pop(request_id).num_bytes if request_id in self._copies else 0

    patch.setattr(HostCopies, "drop", mutated)


def a_request_is_saved_with_the_tokens_of_its_last_chunk_only(patch: Patch) -> None:
    host_copy = Pools.host_copy

    def mutated(self: Any, held: Any) -> Any:
        copy = host_copy(self, held)
        return structs.replace(copy, slots={**copy.slots, "kv": copy.slots["kv"][-1:]})

    patch.setattr(Pools, "host_copy", mutated)


# -- what clients are told --------------------------------------------------------------------------------------------


def the_prompt_is_compared_with_what_its_admission_left_of_the_cache(patch: Patch) -> None:
    admit, report = AdmissionPass._admit, AdmissionPass._report

    def mutated(self: Any, req: Any, match: Any, encoded: Any) -> Any:
        found = admit(self, req, match, encoded)
        return found and report(self, req, match)

    patch.setattr(AdmissionPass, "_admit", mutated)


HYBRID_MUTATIONS = {
    name: apply
    for name, apply in list(globals().items())
    if getattr(apply, "__module__", None) == __name__ and callable(apply)
}
