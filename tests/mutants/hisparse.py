"""Rules of KV in two tiers (HiSparse): hot buffers, resident copies, and what is written where."""

from tests.mutants.mutant import Mutant

_OPS = "ops/test_tiers.py::"
_TOKENS = "integration/test_hisparse.py::"
_RESIDENTS = "memory/kinds/resident/residents.py"
_COPIES = "memory/test_residents.py::"

HISPARSE = (
    Mutant(
        "C23 the newest token is bound to its hot buffer",
        "ops/reference/tiers.py",
        "        newest.index_put_((seqs, at), torch.where(hot, positions.int(), newest[seqs, at]))\n",
        "",
        _OPS + "test_swap_in_newest_tokens_are_read_where_they_were_bound",
    ),
    Mutant(
        "C23 a column is not replaced in the step that reads it",
        "ops/reference/tiers.py",
        "if int(self._last_used[column]) >= self._now:",
        "if int(self._last_used[column]) > self._now:",
        _OPS + "test_swap_in_without_a_free_column_reads_the_host_tier",
    ),
    Mutant(
        "C23 a column that a later query of the step reads is used by the step",
        "ops/reference/tiers.py",
        "                hot.touch({position for own in chosen.values() for position in own})\n",
        "                pass\n",
        _OPS + "test_swap_in_random_steps_equal_a_dictionary",
    ),
    Mutant(
        "C16 C23 the column of a rejected draft token holds no earlier token",
        "ops/reference/tiers.py",
        "return int(self._newest[position % self._layout.page_size]) == position",
        "return int(self._newest[position % self._layout.page_size]) >= position",
        _OPS + "test_swap_in_rejected_draft_token_is_bound_again_before_it_is_read",
    ),
    Mutant(
        "C11 C23 the coordinator gets the plan's host values",
        "runtime/kinds/resident.py",
        "mirrors = self._mirrors or (None, None)",
        "mirrors = (None, None)",
        "runtime/test_hisparse.py::test_layer_input_gives_the_plan_s_host_values_and_reads_nothing_back",
    ),
    Mutant(
        "C23 host values are checked before a step is replayed",
        "runtime/kinds/resident.py",
        "        self._check_mirrors(*self._mirrors)",
        "        pass",
        "runtime/test_hisparse.py::test_check_plan_with_wrong_mirrors_is_refused_before_a_step_is_replayed",
    ),
    Mutant(
        "C23 a sequence of one token is let in",
        "runtime/kinds/resident.py",
        "(shortest := int(seq_lens_cpu.min())) < 1:",
        "(shortest := int(seq_lens_cpu.min())) <= 1:",
        "runtime/test_hisparse.py::test_layer_input_gives_the_plan_s_host_values_and_reads_nothing_back",
    ),
    Mutant(
        "C23 a row that is given out has an empty hot buffer",
        "runtime/kinds/resident.py",
        'rows.reset_rows(columns["admit_rows"])',
        "pass",
        _TOKENS + "test_hisparse_retraction_equals_off",
    ),
    Mutant(
        "C23 a decode reads its hot buffer from its first step on",
        "runtime/kinds/resident.py",
        'rows["active"].index_fill_(0, columns["hot_rows"], 1)',
        "pass",
        _TOKENS + "test_hisparse_equals_off_by_size",
    ),
    Mutant(
        "C19 C23 the copies of a prefix hit hold what the host tier has",
        "runtime/kinds/resident.py",
        'self._cache.mover.load(columns["load_pages"], columns["load_slots"])',
        "pass",
        _TOKENS + "test_hisparse_prefix_hits_equal_off",
    ),
    Mutant(
        "C23 KV is written through to the host tier",
        "layers/paged_attention.py",
        "for loc in (step.device_loc, step.host_loc):",
        "for loc in (step.device_loc,):",
        _TOKENS + "test_hisparse_equals_off_by_size",
    ),
    Mutant(
        "C23 KV is written to the device, where the step's own queries read it",
        "layers/paged_attention.py",
        "for loc in (step.device_loc, step.host_loc):",
        "for loc in (step.host_loc,):",
        _TOKENS + "test_hisparse_equals_off_by_size",
    ),
    Mutant(
        "C23 the device learns at admission that a page has no copy, whatever it knew",
        _RESIDENTS,
        "        self._changed.append(pages)\n        there = ",
        "        there = ",
        _COPIES + "test_what_comes_from_elsewhere_has_no_copies_and_the_device_learns_that",
    ),
    Mutant(
        "C26 what comes back from a host copy is not loaded before it is there",
        _RESIDENTS,
        "        there = pages[: allocation.pin.num_pages]\n",
        "        there = pages[: allocation.kv_len // self._rows.page_size]\n"
        "        arrival = Arrival(arrival.num_prompt)\n",
        "simulation/test_tiered.py::test_tiers_random_traffic_reads_what_the_host_tier_has",
    ),
    Mutant(
        "C8 a copy is freed as what it is, not as the page of KV that it is of",
        _RESIDENTS,
        "self.slots.return_ids(self._detach(allocation.id), allocation.id)",
        "self.slots.return_ids(self._rows.pages(row, 0, len(self._detach(allocation.id))), allocation.id)",
        _COPIES + "test_a_request_that_decodes_frees_its_copies_once_and_gets_a_hot_buffer",
    ),
    Mutant(
        "C23 a page that is given up loses its copy",
        _RESIDENTS,
        "        return Holding(self, self._unmap(there))\n",
        "        return None\n",
        _COPIES + "test_a_page_that_is_given_up_loses_its_copy",
    ),
    Mutant(
        "C23 the device learns that a page has no copy any more",
        _RESIDENTS,
        "        self._changed.append(pages)\n        return ids\n",
        "        return ids\n",
        _COPIES + "test_a_copy_is_of_the_request_that_took_it_and_others_read_it_meanwhile",
    ),
    Mutant(
        "C23 a page that has tokens already gets no copy, which would lack them",
        _RESIDENTS,
        "first, last = ceil_div(allocation.kv_len, page_size), ceil_div(stop, page_size)",
        "first, last = allocation.kv_len // page_size, ceil_div(stop, page_size)",
        _COPIES + "test_pages_of_a_chunk_get_copies_as_far_as_there_are_some",
    ),
    Mutant(
        "C21 copies of pages are no part of what goes to another engine",
        _RESIDENTS,
        "    def start_over(self, draft: Draft) -> None:\n",
        "    def transfer_slots(self, allocation: Allocation, pages: Ids, start: int = 0) -> Ids:\n"
        "        return self.full_to_hisparse_device_index_mapping[pages].astype(np.int64)\n\n"
        "    def start_over(self, draft: Draft) -> None:\n",
        _TOKENS + "test_c21_hisparse_on_one_or_both_of_two_engines_equals_off",
    ),
    Mutant(
        "C25 hot buffers are empty after a wake",
        "engine/lifecycle/occupation.py",
        "                self._runner.cache.reset()\n",
        "",
        "engine/test_sleep.py::test_c25_hot_buffers_are_empty_after_a_wake",
    ),
    Mutant(
        "C33 a key that stands twice in --hisparse-config is refused",
        "config/hisparse.py",
        "if names.count(name) > 1:",
        "if names.count(name) > 2:",
        "config/test_hisparse.py::test_hisparse_config_that_cannot_work_is_refused_with_one_line",
    ),
    Mutant(
        "C4 a request has at least as many tokens of KV as its hot buffer",
        "memory/budget.py",
        "return max(1, ceil_div(min(self.hot_tokens, self.possible_context), self.page_size))",
        "return 1",
        "engine/test_sizing.py::test_hot_buffers_leave_room_for_the_kv_that_they_are_for",
    ),
    Mutant(
        "C4 KV in a file is none of the memory that is divided",
        "engine/lifecycle/sizing.py",
        'elsewhere = resident.num_bytes if options.host_path or config.device == "cuda" else 0',
        "elsewhere = 0",
        "engine/test_sizing.py::test_kv_in_a_file_leaves_memory_for_more_pages",
    ),
)
