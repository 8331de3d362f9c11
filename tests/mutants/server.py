"""Rules of `server/` and `text/`: what clients may ask, what they are shown, and when they leave."""

from tests.mutants.mutant import Mutant

SERVER = (
    Mutant(
        "C28 of two stop strings that one token completes the one that begins first ends the text",
        "text/detokenizer.py",
        "                at, found = place, stop\n",
        "                at, found = place, stop\n                break\n",
        "text/test_detokenizer.py::test_which_of_two_stop_strings_ends_the_text",
    ),
    Mutant(
        "C28 of two stop strings that begin together the one named first ends the text",
        "text/detokenizer.py",
        "            place = text.find(stop, 0, at + len(stop) - 1)\n            if 0 <= place < at:",
        "            place = text.find(stop)\n            if 0 <= place <= at:",
        "text/test_detokenizer.py::test_which_of_two_stop_strings_ends_the_text",
    ),
    Mutant(
        "C27 no stop string nor the beginning of one is shown",
        "text/detokenizer.py",
        "        keep = self._held_back(text)\n",
        "        keep = 0\n",
        "text/test_detokenizer.py::test_the_beginning_of_a_stop_string_is_held_until_it_is_none",
    ),
    Mutant(
        "C27 what was held back is text after all when the answer ends",
        "text/detokenizer.py",
        '            text, self._held = text + self._held, ""\n',
        '            self._held = ""\n',
        "text/test_detokenizer.py::test_deltas_joined_are_the_whole_text_up_to_the_stop_string",
    ),
    Mutant(
        "C27 half a character is not shown",
        "text/detokenizer.py",
        "            text = self._decoder.decode(self._table.in_text(token))\n            self._is_open",
        '            text = self._table.in_text(token).decode("utf-8", "replace")\n            self._is_open',
        "text/test_detokenizer.py::test_half_a_character_is_never_shown",
    ),
    Mutant(
        "C27 of a client that left while its text was tokenized the engine hears nothing",
        "server/generate.py",
        "        if watch.gone:\n            raise ClientGone\n",
        "",
        "server/test_leaving.py::test_c27_of_a_client_that_leaves_while_its_text_is_tokenized_the_engine_hears_nothing",
    ),
    Mutant(
        "C27 a client that leaves ends its generation",
        "server/generate.py",
        "        watch.on_gone(generation.disconnect)\n",
        "",
        "server/test_limits.py::test_abort_reaches_the_engine_within_a_second",
    ),
    Mutant(
        "C27 a stop string ends the request in the engine too",
        "server/generation.py",
        '            self.finish = "stop"\n            self.stream.abort()\n',
        '            self.finish = "stop"\n',
        "server/test_generation.py::test_c27_a_stop_string_ends_the_request_in_the_engine_too",
    ),
    Mutant(
        "C27 of several choices none is left in the engine when a later one is refused",
        "server/generation.py",
        "            generation.abort()\n            raise\n",
        "            raise\n",
        "server/test_generation.py::test_c27_what_was_submitted_is_aborted_when_a_later_choice_is_refused",
    ),
    Mutant(
        "C28 choices of one seed differ and repeat",
        "server/generation.py",
        "    if number == 0:\n        return seed\n",
        "    return seed\n",
        "server/test_generation.py::test_c28_choices_of_one_seed_differ_and_repeat",
    ),
    Mutant(
        "C29 tenants have namespaces of their own",
        "server/security.py",
        "label = f\"{tenant}\\0{cache_salt if cache_salt is not None else ''}\".encode()",
        "label = f\"{cache_salt if cache_salt is not None else ''}\".encode()",
        "server/test_security.py::test_tenants_do_not_share_a_namespace_and_cannot_name_anothers",
    ),
)
