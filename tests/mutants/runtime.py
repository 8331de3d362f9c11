"""Rules of `runtime/`, `pools/` and `ops/`: padding, replay, copies, sampling."""

from tests.mutants.mutant import Mutant

_PLAN, _DECODE, _EXTEND = "requests/step_plan.py", "runtime/decode_step.py", "runtime/extend_step.py"
_PADDED_DECODE = "runtime/test_decode_step.py::test_c13_a_padded_row_of_a_decode_step_is_nobodys"
_PADDED_EXTEND = "runtime/test_decode_step.py::test_c13_padded_tokens_of_a_step_with_prompts_are_nobodys"


def _pad(what: str, file: str, declared: str, pad: str, wrong: str, test: str) -> Mutant:
    """`declared` is the end of the column's declaration before its pad."""
    return Mutant(
        f"C13 a padded {what} is {pad}",
        file,
        f"{declared}, pad={pad})",
        f"{declared}, pad={wrong})",
        test,
    )


RUNTIME = (
    # -- padding and replay -------------------------------------------------------------------------------------------
    _pad("`req_pool_indices`", _PLAN, 'device_name="req_pool_indices"', "PAD", "1", _PADDED_DECODE),
    _pad("`state_slots`", _PLAN, '"state", device=np.int32', "PAD", "1", _PADDED_DECODE),
    _pad(
        "`mamba_track_indices`",
        "runtime/kinds.py",
        '"mamba_track_indices": Column(torch.int32',
        "PAD",
        "1",
        _PADDED_DECODE,
    ),
    _pad("`input_ids` of extend steps", _EXTEND, "input_ids = Column(torch.int64", "0", "1", _PADDED_EXTEND),
    _pad("`q_ends`", "runtime/ragged.py", '"q_ends": Column(torch.int32', '"T"', "0", _PADDED_EXTEND),
    _pad("`snap_stops`", _EXTEND, "snap_stops = Column(torch.int32", '"T"', "0", _PADDED_EXTEND),
    _pad("`snap_slots`", "runtime/kinds.py", '"snap_slots": Column(torch.int32', "PAD", "1", _PADDED_EXTEND),
    Mutant(
        "C13 `positions` and `out_cache_loc` of a padded token are 0",
        "ops/steps.py",
        "        real = row_of_token != _PAD\n",
        "        real = row_of_token >= _PAD\n",
        "ops/test_steps.py::test_tokens_stand_behind_what_their_rows_have",
    ),
    Mutant(
        "C13 `seq_lens` of a padded sequence are its tokens, whatever the padding row's length",
        "ops/steps.py",
        "torch.where(rows == _PAD, 0, kv_lens",
        "torch.where(rows < _PAD, 0, kv_lens",
        "ops/test_steps.py::test_tokens_stand_behind_what_their_rows_have",
    ),
    Mutant(
        "C13 an input without a source is padded whole",
        "pools/table.py",
        "            live = n if name in values else 0\n",
        "            if name not in values:\n                continue\n            live = n\n",
        "runtime/test_graph_runner.py::test_an_input_without_a_source_is_padded_and_not_left_as_it_was",
    ),
    Mutant(
        "C13 rows behind the live ones are padded",
        "pools/table.py",
        "            if live < padded:",
        "            if not live:",
        "pools/test_table.py::test_fill_writes_values_pads_the_tail_and_pads_whole_what_has_no_values",
    ),
    Mutant(
        "C13 a column cannot be declared without its pad",
        "pools/table.py",
        "shape: tuple[int | str, ...] = (), *, pad: float | str) -> None:",
        "shape: tuple[int | str, ...] = (), *, pad: float | str = 0) -> None:",
        "pools/test_table.py::test_a_column_without_a_pad_cannot_be_declared",
    ),
    Mutant(
        "C14 a captured step begins by resetting the padding rows that it writes",
        "runtime/graph_runner.py",
        "        for table, column in self._writes:\n            table.reset_padding(column)\n",
        "",
        "runtime/test_decode_step.py::test_c14_a_captured_decode_step_begins_by_resetting_the_padding_row",
    ),
    Mutant(
        "C14 a decode step says that it writes the last tokens",
        "runtime/decode_step.py",
        '(rows, "last_tokens"), ',
        "",
        "runtime/test_decode_step.py::test_c14_a_captured_decode_step_begins_by_resetting_the_padding_row",
    ),
    Mutant(
        "C14 the padding row grows in no step with prompts",
        _EXTEND,
        'writes=[(rows, "kv_lens")]',
        "writes=()",
        "runtime/test_decode_step.py::test_c14_the_padding_row_grows_in_no_captured_step",
    ),
    Mutant(
        "C28 a decode's place is what its row has come to",
        "ops/steps.py",
        "        kv_lens.index_add_(0, rows, q_start.diff().long())\n",
        "        kv_lens.index_add_(0, rows, q_start.diff().clamp(max=1).long())\n",
        "ops/test_steps.py::test_rows_come_further_by_all_of_a_steps_tokens",
    ),
    Mutant(
        "C28 a draft is accepted only behind accepted ones",
        "ops/accept.py",
        "        torch.cumsum(wrong, 0, out=num_wrong[1:])\n",
        "        num_wrong[1:] = num_wrong[0] + wrong\n",
        "ops/test_steps.py::test_drafts_are_accepted_while_they_are_what_was_chosen_before_them",
    ),
    Mutant(
        "C28 what is not finite accepts no draft",
        "ops/accept.py",
        "~(finite[before] & (token_ids[before] == drafts))",
        "(token_ids[before] != drafts)",
        "ops/test_steps.py::test_what_is_no_token_is_never_accepted",
    ),
    Mutant(
        "C18 a decode's snapshot is taken at its length alone",
        "ops/steps.py",
        "torch.where(at + 1 == lens, slots, _PAD)",
        "torch.where(at + 1 >= lens, slots, _PAD)",
        "ops/test_steps.py::test_a_snapshot_is_due_at_its_length_alone",
    ),
    Mutant(
        "C14 a capture runs on padding alone",
        "runtime/graph_runner.py",
        "        self._inputs.fill({}, 0, size)\n",
        "",
        "runtime/test_graph_runner.py::test_a_capture_advances_no_live_row",
    ),
    Mutant(
        "C14 the padding page and slot are as at first after the warm-up",
        "pools/cache_pool.py",
        "        for table in self.tables.values():\n            table.reset_padding()\n",
        "        self.pages.reset_padding()\n",
        "pools/test_cache_pool.py::test_c14_reset_padding_zeroes_page_zero_and_slot_zero_alone",
    ),
    Mutant(
        "C15 outputs are those of the live rows",
        "runtime/graph_runner.py",
        "    return type(outputs)(*(tensor[:n] for tensor in outputs))",
        "    return type(outputs)(*(tensor[-n:] for tensor in outputs))",
        "runtime/test_graph_runner.py::test_a_replay_equals_the_step_run_bare_for_every_batch_and_kind_of_step",
    ),
    Mutant(
        "C15 a batch runs in the smallest size that holds it",
        "runtime/graph_runner.py",
        "        size = self.sizes[bisect_left(self.sizes, n)]",
        "        size = self.sizes[max(0, bisect_left(self.sizes, n) - 1)]",
        "runtime/test_graph_runner.py::test_a_replay_equals_the_step_run_bare_for_every_batch_and_kind_of_step",
    ),
    Mutant(
        "C15 a capture that fails costs no request",
        "runtime/graph_runner.py",
        "        except Exception as error:\n            self._refused = True",
        "        except Uncapturable as error:\n            self._refused = True",
        "runtime/test_graph_runner.py::test_a_capture_that_fails_costs_speed_and_no_request",
    ),
    Mutant(
        "C5 C14 what no query sees does not reach attention's output, were it NaN",
        "ops/attention.py",
        "    v32 = v.float().masked_fill(~seen, 0).repeat_interleave(groups, dim=1)\n",
        "    v32 = v.float().repeat_interleave(groups, dim=1)\n",
        "ops/test_attention.py::test_what_has_left_the_window_never_influences_a_live_row",
    ),
    # -- the device's side of the pools -------------------------------------------------------------------------------
    Mutant(
        "C6 a cleared slot is zero in every layer",
        "pools/table.py",
        "        for name, tensor in self._tensors.items():\n            tensor.index_fill_(0, rows",
        "        for name, tensor in list(self._tensors.items())[:1]:\n            tensor.index_fill_(0, rows",
        "pools/test_cache_pool.py::test_c6_clearing_and_copying_touch_the_named_slots_of_every_layer",
    ),
    Mutant(
        "C6 a copied slot is copied in every layer",
        "pools/table.py",
        "        for tensor in self._tensors.values():\n            tensor.index_copy_(0, dst",
        "        for tensor in list(self._tensors.values())[:1]:\n            tensor.index_copy_(0, dst",
        "pools/test_cache_pool.py::test_c6_clearing_and_copying_touch_the_named_slots_of_every_layer",
    ),
    Mutant(
        "C26 8-bit KV comes back from the host with its scales",
        "runtime/host_copies.py",
        "for tensor in cache.tables[kind].tensors)",
        "for tensor in cache.tables[kind].tensors if tensor.dtype is not torch.float32)",
        "pools/test_cache_pool.py::test_c26_a_copy_of_8_bit_kv_brings_its_scales_along",
    ),
    Mutant(
        "C26 the windows of a copy go where windows are",
        "runtime/host_copies.py",
        "for kind, at in places.items()",
        'for kind, at in (places | {"window": places["kv"]}).items()',
        "pools/test_cache_pool.py::test_c26_a_copy_on_the_host_comes_back_into_other_places",
    ),
    Mutant(
        "C26 a load of nothing fails its step before it does anything",
        "runtime/model_runner.py",
        "        if plan.host.loads:\n            self.inputs.copies.check(plan)\n",
        "",
        "runtime/test_hybrid.py::test_a_load_of_nothing_fails_its_step_and_changes_nothing",
    ),
    Mutant(
        "C26 a copy on the host is gone when it has been loaded",
        "runtime/host_copies.py",
        "self._copies.pop(request_id), places)",
        "self._copies[request_id], places)",
        "runtime/test_host_copies.py::test_c26_a_copy_is_there_until_it_is_loaded_or_dropped",
    ),
    Mutant(
        "C18 a wish is granted when it is certain which tokens are accepted, and not before",
        "runtime/verify_step.py",
        "        return forward.decode(tokens, lambda chosen: forward.accept(chosen, placed.positions, batch))\n",
        "        decoded = forward.decode(tokens, lambda chosen: forward.accept(chosen, placed.positions, batch))\n"
        "        self.settle_kinds(inputs, batch, placed.positions, decoded.num_new)\n"
        "        return decoded\n",
        "runtime/test_hybrid.py::test_c18_a_wish_that_only_the_most_likely_tokens_come_to_leaves_its_slot_alone",
    ),
    # -- steps --------------------------------------------------------------------------------------------------------
    Mutant(
        "C27 every index of a plan is looked at before it becomes an address",
        "runtime/model_runner.py",
        "        self._bounds.check(plan)\n",
        "",
        "runtime/test_hybrid.py::test_a_plan_with_a_slot_too_many_changes_nothing",
    ),
    Mutant(
        "C27 an index at the end of its pool is inside, one behind it is not",
        "runtime/bounds.py",
        " < size - least:",
        " <= size - least:",
        "runtime/test_bounds.py::test_every_index_of_a_plan_is_checked_at_both_ends",
    ),
    Mutant(
        "C27 columns of one length are equally long",
        "runtime/bounds.py",
        "            if count != lengths.setdefault(column.length, count) and (count or size != 0):",
        "            if False:",
        "runtime/test_bounds.py::test_a_column_that_the_model_reads_must_be_whole",
    ),
    Mutant(
        "C10 nobody writes to a plan",
        "requests/parts.py",
        "            values.setflags(write=False)\n",
        "",
        "requests/test_step_plan.py::test_nobody_writes_to_a_plan_not_even_to_one_that_arrived",
    ),
    Mutant(
        "C6 no slot is written twice in a step",
        "runtime/kinds.py",
        "    if counts.max() > 1:",
        "    if False:",
        "runtime/test_bounds.py::test_a_state_slot_that_is_written_twice_or_read_too_late_is_refused",
    ),
    Mutant(
        "C11 a decode step reads back its sampled tokens and nothing else",
        "runtime/forward.py",
        "        return torch.where(self.finite, self.token_ids, FAILED)",
        "        return torch.where(self.finite, self.token_ids, FAILED if self.finite.all().item() else FAILED)",
        "runtime/test_readbacks.py::test_a_decode_step_reads_back_its_sampled_tokens_and_nothing_else",
    ),
    Mutant(
        "C30 a chunk that samples nothing is looked at as well",
        "runtime/model_runner.py",
        "    return token_ids.masked_fill(bounds[1:] != bounds[:-1], FAILED)",
        "    return token_ids",
        "runtime/test_not_finite.py::test_a_chunk_that_samples_nothing_is_looked_at_as_well",
    ),
    Mutant(
        "C10 what the device reads is what the plan says",
        "runtime/packing.py",
        "            section[:] = values\n",
        "            section[:] = values[::-1]\n",
        "runtime/test_changes.py::test_changes_of_random_plans_in_a_row_are_those_of_lists",
    ),
    Mutant(
        "C27 logits that are not finite fail their own request",
        "runtime/forward.py",
        "        return torch.where(self.finite, self.token_ids, FAILED)",
        "        return self.token_ids",
        "runtime/test_model_runner.py::test_a_decode_whose_logits_are_not_finite_fails_alone",
    ),
    Mutant(
        "C28 a draw depends on the position",
        "runtime/sampler.py",
        " + positions * _signed(0x9E3779B97F4A7C15)",
        "",
        "runtime/test_sampler.py::test_uniforms_differ_for_each_seed_and_position",
    ),
    Mutant(
        "C28 a draw depends on the request's seed",
        "runtime/sampler.py",
        "    x = _mix(seeds + _signed(0x9E3779B97F4A7C15))",
        "    x = _mix(0 * seeds + _signed(0x9E3779B97F4A7C15))",
        "runtime/test_sampler.py::test_uniforms_differ_for_each_seed_and_position",
    ),
    Mutant(
        "C28 a row that draws nothing stays greedy beside those that draw",
        "runtime/chooser.py",
        "        return greedy.index_copy(0, which, draw(self._ops, logits, rows, lens, self._rows, wants))",
        "        return draw(self._ops, logits, rows, lens, self._rows, wants)[:1].expand(len(greedy))",
        "runtime/test_model_runner.py::test_a_request_gets_the_same_tokens_and_logprobs_alone_and_in_company",
    ),
    Mutant(
        "C28 a row's next tenant has no penalties of the last",
        "runtime/penalties.py",
        "        self._states.pop(admission.row, None)\n",
        "",
        "runtime/test_penalties.py::test_a_rows_next_tenant_inherits_nothing",
    ),
    Mutant(
        "C26 penalties count what was said before a retraction",
        "runtime/penalties.py",
        "        self.counts.index_add_(0, output, torch.ones(len(output), device=device))\n",
        "",
        "runtime/test_penalties.py::test_a_request_that_comes_back_after_a_retraction_has_the_logits_it_would_have_had",
    ),
    Mutant(
        "C30 a step behind one that failed does not run",
        "runtime/overlap.py",
        "        if self._failed_at == failures_seen:",
        "        if False:",
        "runtime/test_overlap.py::"
        "test_what_is_wrong_with_a_plan_is_raised_by_its_result_and_fails_what_was_launched_behind_it",
    ),
    Mutant(
        "C31 compiled kernels are kept by their variant",
        "ops/compiler.py",
        "repr((_FLAGS, _flags(text, variant), version))",
        "repr((_FLAGS, version))",
        "ops/test_dispatch.py::test_c31_variants_of_the_same_sources_have_libraries_of_their_own",
    ),
)
