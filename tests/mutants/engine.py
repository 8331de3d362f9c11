"""Rules of `engine/`: what crosses between the processes, and how requests end there."""

from tests.mutants.mutant import Mutant

ENGINE = (
    Mutant(
        "C27 the ids of a prompt are looked at before they index anything",
        "engine/core.py",
        '            check_token_ids("prompt", wanted.prompt_token_ids, self._vocab_size)\n',
        "",
        "engine/test_core.py::test_what_can_never_be_served_is_refused_on_arrival",
    ),
    Mutant(
        "C27 a fault while a request is added fails that request only",
        "engine/core.py",
        "        except Exception as error:\n            self.stats.refused += 1",
        "        except ForebayError as error:\n            self.stats.refused += 1",
        "engine/test_core.py::test_a_fault_while_adding_fails_that_request_only",
    ),
    Mutant(
        "C27 an engine whose steps only fail ends",
        "engine/core.py",
        "        if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:",
        "        if False:",
        "engine/test_core.py::test_failing_steps_without_a_success_between_them_end_the_engine",
    ),
    Mutant(
        "C27 a frame over the cap is refused before anything is allocated",
        "engine/channel.py",
        "        if size > MAX_FRAME_BYTES:\n            self._refuse(",
        "        if size > 2**40:\n            self._refuse(",
        "engine/test_channel.py::test_an_oversized_length_is_refused_before_anything_is_allocated",
    ),
    Mutant(
        "C27 a frame out of order is refused",
        "engine/channel.py",
        "        if sequence != self._next:",
        "        if False:",
        "engine/test_channel.py::test_a_frame_out_of_order_is_refused",
    ),
    Mutant(
        "C27 updates that outrun their reader are merged and none is lost",
        "engine/stream.py",
        "    first.token_ids += then.token_ids\n",
        "    first.token_ids = then.token_ids\n",
        "engine/test_async_engine.py::test_updates_that_outrun_their_reader_are_merged_and_none_is_lost",
    ),
    Mutant(
        "C27 whoever leaves a stream aborts its request",
        "engine/stream.py",
        "        self._ended = True\n        self.abort()\n",
        "        self._ended = True\n",
        "engine/test_async_engine.py::test_leaving_a_stream_aborts_its_request",
    ),
    Mutant(
        "C27 a stream that is dropped aborts its request",
        "engine/stream.py",
        "            self._loop.call_soon_threadsafe(self._abort, self.request_id)\n",
        "            pass\n",
        "engine/test_async_engine.py::test_dropping_a_stream_aborts_its_request",
    ),
    Mutant(
        "C27 time in which nobody ran is not counted",
        "base/clock.py",
        "        return counted + min(self._source() - at, MOST_S)",
        "        return counted + self._source() - at",
        "engine/test_core.py::test_time_in_which_nobody_ran_ends_no_request",
    ),
    Mutant(
        "C27 an engine whose loop hangs is given up although its thread speaks",
        "engine/async_engine.py",
        "        if turn_age_s > limit:\n",
        "        if False:\n",
        "engine/test_async_engine.py::test_an_engine_whose_thread_speaks_while_its_loop_hangs_is_given_up_as_well",
    ),
    Mutant(
        "C27 a signal that ends processes ends streams typed",
        "server/listen.py",
        "    handled = set(ENDING) - ignored | {signal.SIGTERM, signal.SIGINT}\n",
        "    handled = {signal.SIGTERM, signal.SIGINT}\n",
        "server/test_signals.py::test_other_signals_that_end_processes_end_it_at_once_and_whoever_is_served_is_told",
    ),
)
