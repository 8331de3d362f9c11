"""Rules of `speculation/`, and of how what was guessed travels."""

from tests.mutants.mutant import Mutant

SPECULATION = (
    Mutant(
        "C16 a draft is accepted in part only if a token behind an accepted one was rejected",
        "scheduler/output_processor.py",
        "(counts > 1) & (counts < flight.plan.q_lens[sampled])",
        "counts < flight.plan.q_lens[sampled]",
        "scheduler/test_widths.py::test_c16_tokens_are_the_same_whatever_is_guessed",
    ),
    Mutant(
        "C29 guesses come from the request's own namespace",
        "speculation/ngram.py",
        "        if kept and kept[0] == reader.namespace:\n",
        "        if kept:\n",
        "speculation/test_ngram.py::test_no_token_comes_from_another_namespace",
    ),
    Mutant(
        "C17 outputs that are kept for guessing stay within their capacity",
        "speculation/ngram.py",
        "        while self.num_kept_tokens > self._capacity:",
        "        while False:",
        "speculation/test_ngram.py::test_what_is_kept_is_the_latest_outputs_and_within_the_capacity",
    ),
    Mutant(
        "C17 nothing is kept of where a request's tokens stood when it has ended",
        "speculation/ngram.py",
        "        self._readers.pop(req.id, None)\n",
        "",
        "speculation/test_ngram.py::test_nothing_is_kept_of_a_request_that_has_ended",
    ),
    Mutant(
        "C17 a width is chosen only while it has gained",
        "speculation/adaptive.py",
        "        best = self.chosen if self.paces[self.chosen].gain_s > 0 else 0\n",
        "        best = self.chosen\n",
        "speculation/test_adaptive.py::test_a_width_that_stopped_paying_is_left_and_found_again",
    ),
    Mutant(
        "C17 trials wait until they are paid for",
        "speculation/adaptive.py",
        "        if self._wait_steps > 0 or self._saved_s < self._expected_loss_s(tried):",
        "        if self._wait_steps > 0:",
        "speculation/test_adaptive.py::test_guesses_that_do_not_pay_cost_little",
    ),
    Mutant(
        "C16 each request gets as many of a step's tokens as are its own",
        "engine/frames.py",
        "self.counts or repeat(1)",
        "repeat(1)",
        "engine/test_channel.py::test_several_tokens_of_a_request_travel_with_their_number",
    ),
    Mutant(
        "C17 a draft model has as many tokens as the model",
        "engine/lifecycle/drafting.py",
        "    if draft.vocab_size != target.vocab_size:\n",
        "    if not draft.vocab_size:\n",
        "engine/test_draft_models.py::test_a_model_that_cannot_draft_is_refused",
    ),
    Mutant(
        "C17 guesses that continue the last token go with no step in flight",
        "config/speculation.py",
        '    if algorithm.on_host and settled["overlap_depth"]:',
        "    if False:",
        "config/test_speculation.py::test_what_cannot_be_is_refused_by_name",
    ),
)
