"""Rules of `disagg/`: what is believed of a peer, and when places are nobody's again."""

from tests.mutants.mutant import Mutant

DISAGG = (
    Mutant(
        "C22 a frame without the session's seal is refused",
        "disagg/seal.py",
        "        if not hmac.compare_digest(mac(self._key, header, body), given):",
        "        if False:",
        "disagg/test_seal.py::test_one_altered_bit_is_found",
    ),
    Mutant(
        "C22 a frame of an older session is refused",
        "disagg/seal.py",
        "        if epoch != self._epoch:",
        "        if False:",
        "disagg/test_seal.py::test_what_is_no_frame_of_this_session_is_refused_for_good",
    ),
    Mutant(
        "C22 a frame that comes twice, or after one that was lost, is refused",
        "disagg/seal.py",
        "        if sequence != self._next:",
        "        if False:",
        "disagg/test_seal.py::test_what_is_no_frame_of_this_session_is_refused_for_good",
    ),
    Mutant(
        "C22 a chunk counts only with the checksum of what was sent",
        "disagg/mover.py",
        "num_bytes == self._memory.num_bytes(piece) and checksum == chunk.checksum",
        "num_bytes == self._memory.num_bytes(piece)",
        "disagg/test_faults.py::test_an_altered_chunk_breaks_its_ticket_alone",
    ),
    Mutant(
        "C22 what comes for a ticket that was closed is not written",
        "disagg/mover.py",
        "        self._landings.pop(nonce, None)\n        for reader",
        "        for reader",
        "disagg/test_faults.py::test_what_comes_for_a_closed_ticket_is_not_written",
    ),
    Mutant(
        "C22 what is still to come of a chunk goes nowhere when its ticket is closed",
        "disagg/mover.py",
        "            reader.divert(nonce)\n",
        "            pass\n",
        "disagg/test_faults.py::test_the_rest_of_a_chunk_is_not_written_when_its_ticket_is_closed",
    ),
    Mutant(
        "C22 a connection of chunks of an older session is refused",
        "disagg/prefill_side.py",
        " or session.hello.epoch != hello.epoch",
        "",
        "disagg/test_faults.py::test_chunks_of_an_earlier_session_are_not_taken",
    ),
    Mutant(
        "C22 a session that was recorded cannot be begun again",
        "disagg/prefill_side.py",
        "        if hello.epoch <= self._epochs.get(hello.instance, 0):",
        "        if False:",
        "disagg/test_faults.py::test_chunks_of_an_earlier_session_are_not_taken",
    ),
    Mutant(
        "C22 the tail alone is not the end",
        "disagg/decode_side.py",
        "receipt.is_complete and receipt.tail is not None",
        "receipt.tail is not None",
        "disagg/test_faults.py::test_a_tail_that_comes_before_the_last_chunk_is_not_the_end",
    ),
    Mutant(
        "C22 places that a peer writes to are not closed before it says so or has died",
        "disagg/decode_side.py",
        "        if receipt.reach is None:\n",
        "        if True:\n",
        "disagg/test_faults.py::test_places_that_a_peer_writes_to_are_closed_by_its_own_word_alone",
    ),
    Mutant(
        "C22 another process on the same port cannot say so for it",
        "disagg/decode_side.py",
        " and receipt.instance == session.instance",
        "",
        "disagg/test_faults.py::test_places_that_a_peer_writes_to_are_closed_by_its_own_word_alone",
    ),
    Mutant(
        "C22 every position lands once and in order",
        "disagg/pages.py",
        "            or (upcoming[region : region + num_regions] != first).any()\n",
        "",
        "disagg/test_pages.py::test_what_is_not_due_is_refused",
    ),
    Mutant(
        "C22 prefill does not end a transfer of less than all",
        "disagg/prefill_side.py",
        "            shipment.departing.check_complete()\n",
        "",
        "disagg/test_faults.py::test_less_than_all_is_never_completed",
    ),
    Mutant(
        "C31 engines that compute other bits do not meet",
        "disagg/layout.py",
        "    if prefill.digest != decode.digest:",
        "    if False:",
        "disagg/test_layout.py::test_a_mismatch_names_both_values",
    ),
)
