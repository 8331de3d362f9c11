"""Rules of `grammar/`, and of how steps keep to it."""

from tests.mutants.mutant import Mutant

_TESTS = "integration/test_grammars.py::"
_SAME = _TESTS + "test_the_same_tokens_come_however_steps_are_made"

GRAMMAR = (
    Mutant(
        "C16 a row under a grammar sits out until its last token is known",
        "scheduler/grammars.py",
        "[req.id in flying or req.id in self.unready for req in reqs]",
        "[req.id in self.unready for req in reqs]",
        _SAME,
    ),
    Mutant(
        "C16 each position has the mask of its own row",
        "runtime/sampling/masks.py",
        "        counts[plan.num_extends :] *= plan.q_lens[plan.num_extends :]\n",
        "",
        _SAME,
    ),
    Mutant(
        "C16 no penalty and no bias lets in what may not come",
        "runtime/steps/chooser.py",
        "        if masked is not None:\n            if logits is raw",
        "        if masked is not None and not wants & Wants.ADJUST:\n            if logits is raw",
        _TESTS + "test_finished_outputs_are_what_their_grammars_say",
    ),
    Mutant(
        "C30 where nothing may come nothing is sampled",
        "grammar/matching.py",
        "                words[job.at : job.at + 1 + len(job.drafts)] = 0",
        "                words[job.at : job.at + 1 + len(job.drafts)] = -1",
        _TESTS + "test_a_broken_matcher_ends_its_request_alone",
    ),
    Mutant(
        "C16 a matcher reads whatever was appended since it was asked",
        "grammar/matching.py",
        "        tokens = req.tokens[req.num_prompt + place.num_read :].tolist()",
        "        tokens = req.tokens[req.num_prompt + place.num_read :][-1:].tolist()",
        _SAME,
    ),
    Mutant(
        "C27 a long text that is forced is not made tokens of for each mask",
        "grammar/vocabulary.py",
        "self._encode(text[: self._most_chars])",
        "self._encode(text)",
        "grammar/test_compiler.py::test_of_a_long_text_that_is_forced_only_the_beginning_is_made_tokens_of_and_once",
    ),
    Mutant(
        "C27 a grammar that breaks when it is used is refused at the door",
        "grammar/check_worker.py",
        "            self._dry_run.run(grammar, self._tokenizer)",
        "            _ = grammar",
        "grammar/test_trial.py::test_what_breaks_behind_a_few_tokens_is_refused_with_their_number",
    ),
    Mutant(
        "C27 a compile that was called off is not remembered",
        "grammar/matching.py",
        "        if prototype.cancel() and",
        "        if not prototype.cancel() and",
        _TESTS + "test_cancelled_grammar_is_not_compiled_or_cached",
    ),
    Mutant(
        "C25 an output that begins again is at the beginning of its grammar",
        "scheduler/halt.py",
        "            if req.params.grammar:\n                queues.constraints.begin(req)\n",
        "",
        "scheduler/test_constraints.py::test_c25_output_that_begins_again_with_other_weights_begins_its_grammar_again",
    ),
    Mutant(
        "C30 what a grammar takes to compile it takes in a process of its own",
        "grammar/checking.py",
        '        except NoAnswer as error:\n            return refused(grammar, f"compiling it {error}").message\n',
        '        except NoAnswer:\n            return ""\n',
        "grammar/test_checking.py::test_a_grammar_that_takes_too_much_is_refused_for_good_and_the_next_one_checked",
    ),
    Mutant(
        "C16 a chunk that is not its prompt's last is sampled under no grammar",
        "scheduler/grammars.py",
        "            if req.id in self.living and stop == req.allocation.extend_target:\n",
        "            if req.id in self.living:\n",
        "scheduler/test_constraints.py"
        "::test_constraints_of_a_step_are_those_of_last_chunks_and_of_decodes_with_their_drafts",
    ),
)
