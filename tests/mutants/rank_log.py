"""Rules of an engine with several ranks: one ordered log, and one outcome of each step."""

from tests.mutants.mutant import Mutant

_SIMULATED = (
    "simulation/test_ranked.py::test_c19_c28_c30_ranks_random_traffic_execute_one_log_and_give_one_runners_tokens"
)

RANK_LOG = (
    Mutant(
        "C19 C28 each plan is sent to every rank",
        "engine/ranks/broadcast.py",
        "        number = self._append(plan)\n",
        "        number = self._append(plan if plan.num_seqs else Void(step=plan.step))\n",
        _SIMULATED,
    ),
    Mutant(
        "C19 a capture is sent to the ranks before rank 0 captures",
        "engine/ranks/broadcast.py",
        "        number = self._append(Capture())\n        more = self._runner.capture_next()\n",
        "        more = self._runner.capture_next()\n        number = self._append(Capture())\n",
        _SIMULATED,
    ),
    Mutant(
        "C30 a sequence that failed on any rank has failed",
        "engine/ranks/broadcast.py",
        "{*result.failed}.union(*(outcome.failed for outcome in outcomes))",
        "{*result.failed}",
        _SIMULATED,
    ),
    Mutant(
        "C30 a step that failed on any rank has failed",
        "engine/ranks/broadcast.py",
        "if outcome.error]:",
        "if not outcomes]:",
        "engine/ranks/test_broadcast.py::test_broadcast_step_that_failed_on_one_rank_alone_fails",
    ),
    Mutant(
        "C19 a rank ends at a gap in the log",
        "engine/ranks/log.py",
        "        if number != self.read.num_entries:\n",
        "        if number < self.read.num_entries:\n",
        "engine/ranks/test_log.py::test_log_record_left_out_names_both_numbers",
    ),
    Mutant(
        "C19 a rank ends at another digest of the log",
        "engine/ranks/log.py",
        "        if digest != self.read.digest:\n",
        "        if len(digest) != DIGEST_BYTES:\n",
        "engine/ranks/test_log.py::test_log_record_after_other_entries_names_both_digests",
    ),
    Mutant(
        "C19 C30 no other thread takes in an outcome between the check for it and the wait",
        "engine/ranks/ring.py",
        "            with self._reading:\n                while incoming.next <= number:\n",
        "            if self._ranks:\n                while incoming.next <= number:\n",
        "engine/ranks/test_ring.py::test_ring_outcome_that_a_watch_could_take_in_is_not_waited_for",
    ),
    Mutant(
        "C19 a record waits for the slowest rank's room",
        "engine/ranks/ring.py",
        "slowest = min(incoming.next for incoming in self._incoming)",
        "slowest = max(incoming.next for incoming in self._incoming)",
        "engine/ranks/test_ring.py::test_ring_full_waits_for_the_slowest_rank",
    ),
    Mutant(
        "C27 a rank that stands still while it changes its memory is lost",
        "engine/ranks/ring.py",
        "if all(entry.limited for entry in self._under_way)",
        "if self._under_way",
        "engine/ranks/test_ring.py::test_ring_working_ranks_are_those_with_an_entry_that_has_no_limit",
    ),
)
