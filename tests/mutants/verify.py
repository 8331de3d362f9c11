"""Rules of the comparison of a running server's answers."""

from tests.mutants.mutant import Mutant

_TEST = "verify/test_remote.py"

VERIFY = (
    Mutant(
        "C19 a comparison that shows nothing is no proof",
        "verify/verdict.py",
        "    return EXIT_TOO_FEW if found.count(Verdict.SAME) < at_least else 0\n",
        "    return 0\n",
        f"{_TEST}::test_budget_that_is_spent_leaves_the_rest_out_and_shows_nothing",
    ),
    Mutant(
        "C19 a failed request is no equal answer",
        "verify/verdict.py",
        "if Verdict.DIFFERENT in found or Verdict.FAILED in found:",
        "if Verdict.DIFFERENT in found:",
        f"{_TEST}::test_failure_in_a_circumstance_is_its_outcome_and_the_others_are_asked",
    ),
    Mutant(
        "C28 circumstances that could not be set up are no proof",
        "cli/verify_engine.py",
        "    return max(1, sum(outcome.verdict is not Verdict.LEFT_OUT for outcome in outcomes))\n",
        "    return sum(outcome.verdict is not Verdict.LEFT_OUT for outcome in outcomes)\n",
        "verify/test_verify.py::test_verify_that_shows_too_little_exits_with_2",
    ),
    Mutant(
        "C28 a planted fault that changes no answer is no detection",
        "verify/self_test.py",
        "found = Found.DETECTED if outcome.verdict in (Verdict.DIFFERENT, Verdict.FAILED) else Found.MISSED",
        "found = Found.DETECTED",
        "verify/test_self_test.py::test_self_test_detects_what_differs_or_fails_and_misses_what_is_the_same",
    ),
    Mutant(
        "C28 a circumstance that differs without a fault detects none",
        "verify/self_test.py",
        "        yield unfit or await",
        "        yield await",
        "verify/test_self_test.py::"
        "test_self_test_does_not_count_a_circumstance_that_differs_or_is_left_out_without_a_fault",
    ),
    Mutant(
        "C28 a request whose prompt was computed here did not come over",
        "verify/circumstances.py",
        "    return answer.history.num_chunks == 0\n",
        "    return True\n",
        "verify/test_shown.py::test_prompt_counts_as_come_over_if_the_decode_engine_computed_none_of_it",
    ),
    Mutant(
        "C28 graphs count as shown for requests that decoded in replayed steps",
        "verify/circumstances.py",
        "    return answer.concurrency > 1 and answer.history.num_replayed > 0\n",
        "    return answer.concurrency > 1\n",
        "verify/test_shown.py::test_graphs_count_only_for_requests_that_decoded_in_replayed_steps",
    ),
    Mutant(
        "C28 steps planned ahead count as shown for requests that they decoded",
        "verify/circumstances.py",
        "    return answer.concurrency > 1 and answer.history.num_ahead > 0\n",
        "    return answer.concurrency > 1\n",
        "verify/test_shown.py::test_steps_planned_ahead_count_only_for_requests_that_they_decoded",
    ),
    Mutant(
        "C28 two ranks count as shown only if both executed every step",
        "verify/circumstances.py",
        'if found and steps == count["engine.steps"] else ""',
        'if found else ""',
        "verify/test_shown.py::test_two_ranks_count_only_if_both_executed_every_step",
    ),
    Mutant(
        "C28 pictures count as shown for answers to pictures alone",
        "verify/circumstances.py",
        "bool(question.pictures) and touched(engines, question, answer)",
        "touched(engines, question, answer)",
        "verify/test_pictures.py::test_circumstance_with_pictures_counts_for_answers_to_pictures_beside_others",
    ),
    Mutant(
        "C28 blame names the settings that are needed, and no others",
        "verify/blame.py",
        "self.needed.append(self.others.pop())",
        "self.needed.append(self.others[-1]), self.others.clear()",
        "verify/test_blame.py::test_blame_is_right_for_planted_pairs_within_its_runs",
    ),
    Mutant(
        "C28 blame says if it did not find the smallest settings",
        "verify/blame.py",
        "if name in found), is_smallest,",
        "if name in found), True,",
        "verify/test_blame.py::test_blame_without_enough_runs_names_what_is_left",
    ),
    Mutant(
        "C19 answers from the prefix cache count as shown only if tokens were cached",
        "verify/remote/circumstances.py",
        'were cached" if found.cached_tokens else ""',
        'were cached"',
        f"{_TEST}::test_cache_that_nothing_reports_is_not_shown",
    ),
    Mutant(
        "C19 a request that differs when repeated is compared no further",
        "verify/remote/run.py",
        "            self._leave_out(session.findings)\n",
        "            pass\n",
        f"{_TEST}::test_requests_that_differ_when_repeated_are_named_and_asked_no_further",
    ),
    Mutant(
        "C19 the smallest batch that changes an answer is named",
        "verify/remote/run.py",
        "from {min(sizes)} request",
        "from {max(sizes)} request",
        f"{_TEST}::test_fault_of_a_server_is_found_and_named",
    ),
    Mutant(
        "C19 compared requests have a salt each",
        "verify/remote/server.py",
        '            body["cache_salt"] = uuid.uuid4().hex\n',
        '            body["cache_salt"] = "salt"\n',
        f"{_TEST}::test_requests_are_salted_where_the_server_has_salts_unless_the_cache_is_compared",
    ),
    Mutant(
        "C31 a receipt names the chat template",
        "server/context.py",
        ', "template": self.tokenizer.template_digest}',
        "}",
        "server/test_receipts.py::test_repeat_runs_nothing_if_what_computes_differs",
    ),
    Mutant(
        "C31 a receipt names the seed that was used",
        "server/api/core/serving.py",
        "seed_of(seed)\n",
        "seed\n",
        "server/test_receipts.py::test_receipt_names_the_seed_that_was_drawn",
    ),
    Mutant(
        "C31 a request that wants no receipt has none, whatever its key",
        "server/api/core/receipts.py",
        '("receipt" not in body.model_fields_set and num_choices == 1)',
        "num_choices == 1",
        "server/test_receipts.py::test_key_whose_answers_have_receipts_gives_them_unless_the_request_says_otherwise",
    ),
    Mutant(
        "C31 a receipt that was changed is refused",
        "verify/receipts.py",
        'if digest_of(receipt) != receipt.get("digest") or not _is_whole(receipt):',
        "if not _is_whole(receipt):",
        "server/test_receipts.py::test_file_that_has_no_whole_receipt_is_refused",
    ),
)
