"""Rules of `route/`, of what servers are told of their other half, and of what a role makes of other settings."""

from tests.mutants.mutant import Mutant

ROUTE = (
    Mutant(
        "C21 a decode server keeps no tree unless that is asked for",
        "config/disaggregation.py",
        "    return enabled or role_of(values) is not DisaggregationMode.DECODE\n",
        "    return True\n",
        "config/test_disaggregation.py::test_a_decode_server_keeps_no_tree_unless_that_is_asked_for",
    ),
    Mutant(
        "C21 an extra buffer without a tree becomes no buffer",
        "config/disaggregation.py",
        "            settled[name] = instead\n",
        "",
        "config/test_disaggregation.py::test_an_extra_buffer_without_a_tree_becomes_no_buffer_with_one_warning",
    ),
    Mutant(
        "C21 each choice has a room of its own",
        "server/answering/rendezvous.py",
        "        rooms = [(room + i) & MAX_ROOM for i, room in enumerate(rooms)]\n",
        "        pass\n",
        "server/test_rendezvous.py::test_a_gateways_words_reach_the_engine_once_for_each_choice",
    ),
    Mutant(
        "C21 a server that computes whole requests takes no half of one",
        "server/answering/rendezvous.py",
        "        _refuse_all(body)\n",
        "",
        "server/test_rendezvous.py::test_what_makes_no_sense_of_a_half_is_a_400_that_names_the_field",
    ),
    Mutant(
        "C21 a router takes a server for what it says to be",
        "route/members.py",
        "        if role != self.role:\n",
        "        if False:\n",
        "route/test_router.py::test_a_server_of_another_role_is_not_taken_for_one",
    ),
    Mutant(
        "C27 what a client writes into a path stays in it on its way to a member",
        "route/app.py",
        '    raw: bytes = request.scope["raw_path"]\n',
        "    raw = request.url.path.encode()\n",
        "route/test_router.py::test_what_a_client_writes_into_a_path_stays_in_it",
    ),
    Mutant(
        "C22 where prefill refuses, decode does not wait for it",
        "route/halves.py",
        "            if not ours.done() and (head := theirs.result()).status != 200:\n",
        "            if not ours.done() and (head := theirs.result()).status == 0:\n",
        "route/test_router.py::test_prefill_that_refuses_is_heard_at_once_and_decode_waits_for_nothing",
    ),
    Mutant(
        "C22 a client that leaves ends both halves",
        "route/halves.py",
        "        watch.on_gone(halves.abort)\n",
        "",
        "route/test_router.py::test_a_client_that_leaves_ends_both_halves",
    ),
    Mutant(
        "C22 before the first token another server takes over",
        "route/halves.py",
        "MOST_ATTEMPTS: Final = 3\n",
        "MOST_ATTEMPTS: Final = 1\n",
        "route/test_router.py::test_before_the_first_token_another_server_takes_over",
    ),
    Mutant(
        "C22 a failure behind the first token is told in the stream",
        "route/app.py",
        '                ending = error_ending(error, scope["path"])\n',
        "                pass\n",
        "route/test_router.py::test_a_connection_that_breaks_in_a_stream_is_told_in_it",
    ),
)
