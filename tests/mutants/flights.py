"""Rules of the flight recorder: every input is recorded, nothing secret is, and each plan is compared."""

from tests.mutants.mutant import Mutant

_SIMULATED = "simulation/test_recorded.py::test_replay_recorded_simulation_decides_the_same_plans"
_HIDDEN = "simulation/test_recorded.py::test_hidden_records_have_no_token_and_equal_prefixes_stay_equal"
_SHOWN = "test_recordings_with_pictures_and_adapters_hold_neither_pixels_nor_paths_and_are_replayed"
_FILES = "engine/test_recordings.py"
_KILLED = f"{_FILES}::test_recordings_engine_killed_under_load_leaves_a_private_file_without_the_prompt"
_OVERWRITTEN = "test_recordings_ring_that_was_overwritten_is_replayed_from_an_idle_moment"

FLIGHTS = (
    Mutant(
        "C19 an abort is recorded",
        "scheduler/scheduler.py",
        "            self.queues.journal(Aborted(request_id))\n",
        "            pass\n",
        _SIMULATED,
    ),
    Mutant(
        "C19 an event of a transfer is recorded",
        "scheduler/handoff.py",
        "            self.queues.journal(Transferred.of(event, now))\n",
        "            pass\n",
        _SIMULATED,
    ),
    Mutant(
        "C25 a halt is recorded",
        "scheduler/halt.py",
        "            self._queues.journal(Halted(mode.value))\n",
        "            pass\n",
        _SIMULATED,
    ),
    Mutant(
        "C25 a plan of a halt is recorded",
        "scheduler/halt.py",
        "            queues.journal(plan)\n",
        "            pass\n",
        _SIMULATED,
    ),
    Mutant(
        "C19 drafts of the host are recorded",
        "scheduler/scheduler.py",
        "            self.queues.journal(Drafted(counts[most > 0].tolist()))\n",
        "            pass\n",
        _SIMULATED,
    ),
    Mutant(
        "C19 an adapter that is loaded is recorded",
        "memory/adapters.py",
        "        self.note(AdapterChanged(Change.BEGIN, name, replace))\n",
        "        pass\n",
        _SIMULATED,
    ),
    Mutant(
        "C19 the end of requests whose adapter is lost is recorded",
        "scheduler/recovery.py",
        "    queues.record(AdapterLost(adapter_number))\n",
        "    pass\n",
        f"{_FILES}::{_SHOWN}",
    ),
    Mutant(
        "C19 pictures of a request are recorded",
        "scheduler/scheduler.py",
        "Added.of(req, now, pictures)",
        "Added.of(req, now)",
        f"{_FILES}::{_SHOWN}",
    ),
    Mutant(
        "C19 plans are compared in the places of pictures",
        "scheduler/journal.py",
        "        sum_ = _of_prompts(plan, sum_)\n",
        "        pass\n",
        f"{_FILES}::test_replay_with_another_picture_differs",
    ),
    Mutant(
        "C29 a file has no digest of a picture that others can compute",
        "engine/recorder/hidden.py",
        "digest=self._picture(shown.digest)",
        "digest=shown.digest",
        f"{_FILES}::{_SHOWN}",
    ),
    Mutant(
        "C29 a file has no name of an adapter",
        "engine/recorder/hidden.py",
        "                return replace(record, name=self._name(record.name))\n",
        "                return record\n",
        f"{_FILES}::{_SHOWN}",
    ),
    Mutant(
        "C29 the state of an idle engine has no name of an adapter",
        "engine/recorder/hidden.py",
        "        scheduler.pools.adapters.rename(self._name)\n",
        "        pass\n",
        f"{_FILES}::test_replay_from_a_mark_of_an_engine_with_pictures_and_adapters_is_the_same",
    ),
    Mutant(
        "C29 the state of an idle engine has no digest of a picture",
        "engine/recorder/hidden.py",
        "            rename(scheduler.pools.pictures, self._key_of)\n",
        "            pass\n",
        f"{_FILES}::test_replay_from_a_mark_of_an_engine_with_pictures_and_adapters_is_the_same",
    ),
    Mutant(
        "C19 a state that cannot be kept is recorded as such",
        "engine/recorder/recorder.py",
        'why = b"", str(error)',
        'why = b"", ""',
        f"{_FILES}::test_state_that_cannot_be_kept_is_named_by_the_replay",
    ),
    Mutant(
        "C19 a failed step is recorded",
        "scheduler/scheduler.py",
        "            self.queues.journal(StepFailed(plan.step, error.code))\n",
        "            pass\n",
        _SIMULATED,
    ),
    Mutant(
        "C19 a token that ends its request does so without its id",
        "engine/recorder/hidden.py",
        "                stopped.append(i)\n",
        "                pass\n",
        _SIMULATED,
    ),
    Mutant(
        "C19 a plan is recorded before the next input",
        "engine/recorder/recorder.py",
        "            self._append(data, before)\n",
        "            self._append(data)\n",
        _SIMULATED,
    ),
    Mutant(
        "C19 a replay compares each plan",
        "engine/recorder/replay.py",
        "            if recorded != planned:\n",
        "            if recorded is None:\n",
        f"{_FILES}::test_replay_plan_that_differs_is_printed_beside_the_recorded_one",
    ),
    Mutant(
        "C29 a file has no tokens unless that is set",
        "engine/recorder/file.py",
        "    if not header.has_tokens:\n",
        "    if header.reason == '':\n",
        _KILLED,
    ),
    Mutant(
        "C29 a hash depends on all tokens before it",
        "engine/recorder/hidden.py",
        'self._state + token.to_bytes(4, "little", signed=True)',
        'token.to_bytes(4, "little", signed=True)',
        _HIDDEN,
    ),
    Mutant(
        "C29 a file has no name of a client",
        "engine/recorder/hidden.py",
        "            namespace=self._name(record.namespace),\n",
        "            namespace=record.namespace,\n",
        f"{_FILES}::test_recordings_hold_no_text_of_a_request",
    ),
    Mutant(
        "C29 only its owner reads a file",
        "engine/recorder/file.py",
        "os.O_EXCL, 0o600)",
        "os.O_EXCL, 0o644)",
        _KILLED,
    ),
    Mutant(
        "C19 a replay from the middle begins with what was cached",
        "engine/recorder/replay.py",
        "            mark.put(self.scheduler, marked.state)\n",
        "            pass\n",
        f"{_FILES}::{_OVERWRITTEN}",
    ),
    Mutant(
        "C29 the state of an idle engine has no tokens",
        "engine/recorder/hidden.py",
        "                return self._marked(record)\n",
        "                return record\n",
        f"{_FILES}::{_OVERWRITTEN}",
    ),
    Mutant(
        "C19 a state is that of an engine at rest",
        "engine/recorder/mark.py",
        "        if busy or not scheduler.idle:\n",
        "        if False:\n",
        "engine/test_recordings.py::test_marks_scheduler_with_a_request_has_no_state",
    ),
    Mutant(
        "C28 the choices of recorded plans are compared with those of each request alone",
        "engine/recorder/tiny.py",
        "if pair.recorded != pair.alone]",
        "if pair.recorded is None]",
        "engine/test_replay_on_tiny.py::test_replay_on_tiny_fault_of_memory_is_shown",
    ),
    Mutant(
        "C6 memory that was freed is poisoned before the next plan",
        "engine/recorder/tiny.py",
        "                    self._engine.fill(name, freed, _POISON)\n",
        "                    pass\n",
        "engine/test_replay_on_tiny.py::test_replay_on_tiny_poisons_what_is_free",
    ),
)
