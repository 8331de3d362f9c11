"""Rules of the kernels for GPUs, found in Triton's interpreter; see `tests.mutants`."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_ATTENTION = "ops/triton/attention.py"
_EVERY_STEP = "ops/test_triton_segments.py::test_c31_attention_of_a_position_is_the_same_in_every_step"
_LAUNCH = "ops/triton/launch.py"
_PRODUCTS = "ops/triton/products.py"
_SCANS = "ops/triton/scans.py"
_ANY_CUT = "ops/test_triton.py::test_c31_a_scan_in_chunks_has_the_same_bits_wherever_a_step_begins_and_ends"
_ANY_ROWS = "ops/test_triton_linear.py::test_c31_a_row_of_a_product_has_the_same_bits_among_any_number_of_rows"
_IN_CODES = "ops/test_triton_linear.py::test_linear_in_codes_is_linear_of_the_values"
_ANY_STEP = "ops/test_triton_linear.py::test_c31_a_token_s_experts_give_it_the_same_bits_in_every_step"
_TIERS = "ops/triton/tiers.py"
_COMPRESSED = "ops/test_triton_compressed.py"
_COPIES = "pools/test_copy_stream.py"
_ANY_EDGE = "ops/test_triton.py::test_attention_equals_the_reference_where_a_block_of_keys_begins_to_need_a_mask"
_WITHIN = "ops/test_triton.py::test_attention_within_segments_equals_the_reference[interpreter-float32-lens0]"
_CUT_UP = "ops/test_triton_segments.py::test_c31_bits_of_attention_do_not_depend_on_how_it_is_cut_up"

GPU: Final[tuple[Mutant, ...]] = (
    Mutant(
        "C31 blocks of keys begin at the same positions for every query",
        _ATTENTION,
        "tl.maximum(begin_at, oldest // KEYS * KEYS)",
        "tl.maximum(begin_at, oldest)",
        _EVERY_STEP,
    ),
    Mutant(
        "C31 sums of segments are folded in the order of positions",
        _ATTENTION,
        "        at = first + segment\n",
        "        at = first + tl.load(part_count + token) - 1 - segment\n",
        _EVERY_STEP,
    ),
    Mutant(
        "C31 a segment of which a query sees no key changes none of its bits",
        _ATTENTION,
        "tl.where(computed[:, None], values, acc)",
        "tl.where(computed[:, None], values, 1.00001 * acc)",
        _EVERY_STEP,
    ),
    Mutant(
        "C31 a prompt's keys have segments as a decode's have",
        _ATTENTION,
        "            SEGMENT=segment,\n",
        "            SEGMENT=segment if tiling.programs else 1 << 30,\n",
        _EVERY_STEP,
    ),
    Mutant(
        "C31 prompts take a matrix unit of 64 rows only where it was seen to have the bits of that of 16",
        _ATTENTION,
        "arch // 10 == 9 and dv <= 128",
        "arch >= 90 and dv <= 128",
        "ops/test_triton_segments.py::test_c31_prompts_take_another_matrix_unit_than_decodes_only_where_both_had_the_same_bits",
    ),
    Mutant(
        "C31 a block of keys needs no mask only if the block's first query sees its last key",
        _ATTENTION,
        "clear_stop = before + begin + 1\n",
        "clear_stop = before + begin + 2\n",
        f"{_ANY_EDGE}[interpreter-causal]",
    ),
    Mutant(
        "C31 a block of keys needs no mask only if its first key is in the window of the block's last query",
        _ATTENTION,
        "tl.minimum(begin + QUERIES, count) - WINDOW, 0)",
        "tl.minimum(begin + QUERIES, count) - WINDOW - 1, 0)",
        f"{_ANY_EDGE}[interpreter-window]",
    ),
    Mutant(
        "C31 a block of keys needs no mask only if the sequence has its last key",
        _ATTENTION,
        "clear, clear_stop = oldest, stop\n",
        "clear, clear_stop = oldest, stop + 1\n",
        _WITHIN,
    ),
    Mutant(
        "C31 a sink is a power of two as the scores are",
        _ATTENTION,
        "        sink *= LOG2_E\n",
        "",
        f"{_ANY_EDGE}[interpreter-causal]",
    ),
    Mutant(
        "C31 capped scores are powers of two as others are",
        _ATTENTION,
        "softcap * LOG2_E * (2.0",
        "softcap * (2.0",
        f"{_ANY_EDGE}[interpreter-causal]",
    ),
    Mutant(
        "C31 as many segments as a sequence has, not as many as programs",
        _ATTENTION,
        "tl.zeros([ROWS], tl.int32) + count_segments",
        "tl.zeros([ROWS], tl.int32) + tl.minimum(count_segments, 2)",
        _CUT_UP,
    ),
    Mutant(
        "C30 a segment whose scores are no numbers is not taken for one without keys",
        _ATTENTION,
        "    computed = part_total != 0.0\n",
        "    computed = part_total > 0.0\n",
        "ops/test_triton_segments.py::test_a_key_that_is_not_a_number_is_in_the_result_of_its_own_segment_c30",
    ),
    Mutant(
        "C31 products of a shape are compared in a later row, too",
        "ops/triton/choices.py",
        "for at in (0, count - 1)",
        "for at in (0,)",
        "ops/test_triton_choices.py::test_c31_a_product_whose_bits_depend_on_the_number_of_rows_is_found",
    ),
    Mutant(
        "C31 products of a shape are compared up to the most rows of a step with prompts",
        "ops/triton/linear.py",
        "min(most_rows, _PROBE_BYTES // (4 * len(weight)))",
        "min(most_rows // 2, _PROBE_BYTES // (4 * len(weight)))",
        "ops/test_triton_choices.py::test_c31_probe_compares_a_shape_with_the_most_rows_of_a_step_within_its_memory",
    ),
    Mutant(
        "C31 products are chosen by their bits, unless exact is off",
        "backends/triton.py",
        "    if not options.exact:\n",
        "    if options.exact:\n",
        "ops/test_triton_choices.py::test_c31_bits_are_compared_and_workspaces_left_out_unless_exact_is_off",
    ),
    Mutant(
        "C28 C31 products of ranks have the bits of the whole weight's",
        "backends/triton.py",
        "    if options.of_ranks:\n",
        "    if not options.of_ranks:\n",
        "ops/test_triton_choices.py::test_c31_products_of_ranks_are_the_kernel_s_whose_bits_depend_on_no_number_of_outputs",
    ),
    Mutant(
        "C15 no graph is replayed with more tokens than were captured",
        "runtime/steps/extend.py",
        "return self.captured.run(self._columns(inputs, input_ids), plan.num_tokens)",
        "return self.captured.run(self._columns(inputs, input_ids), min(plan.num_tokens, self.captured.sizes[0]))",
        "runtime/test_cuda_graphs.py::test_c15_steps_with_prompts_in_cuda_graphs_give_the_bits_of_their_python",
    ),
    Mutant(
        "C15 steps of more tokens than any graph has run by their Python",
        "runtime/steps/extend.py",
        "0 < plan.num_tokens <= self.captured.sizes[-1]",
        "0 < plan.num_tokens",
        "runtime/test_cuda_graphs.py::test_c15_a_step_of_more_tokens_than_any_graph_has_runs_by_its_python",
    ),
    Mutant(
        "C31 the sum of FP8 products has a scale for each step, not one of the row's first",
        _PRODUCTS,
        "x_scale = tl.load(x_scales_at + start // DEPTH, mask=live, other=0.0)",
        "x_scale = tl.load(x_scales_at, mask=live, other=0.0)",
        "ops/test_triton_linear.py::test_fp8_inputs_are_multiplied_as_they_are_rounded",
    ),
    Mutant(
        "C31 codes of inputs have the order of a plane's",
        _PRODUCTS,
        "place = at // 16 * 16 + (pair % 4 * 2 + pair // 4) * 2 + at % 2",
        "place = at",
        "ops/test_triton_linear.py::test_fp8_inputs_are_multiplied_as_they_are_rounded",
    ),
    Mutant(
        "C31 a SparseMixer of a GPU weighs the second expert without the first",
        "ops/triton/experts.py",
        "_share_among_near(own, live & (e != first), e, second, far)",
        "_share_among_near(own, live, e, second, far)",
        "ops/test_triton.py::test_sparse_mixer_equals_the_reference_and_no_other_row_changes_it",
    ),
    Mutant(
        "C31 a head's rows are multiplied by its own weight, however many there are",
        "ops/triton/experts.py",
        "first = starts[:-1] // block_rows + heads",
        "first = starts[:-1] // block_rows",
        "ops/test_triton_linear.py::test_c31_a_token_s_heads_have_the_same_bits_among_any_number_of_tokens",
    ),
    Mutant(
        "C31 a token's experts are added up in the token's own order",
        "ops/triton/experts.py",
        "row = token * choices + j\n",
        "row = token * choices + (j + token) % choices\n",
        _ANY_STEP,
    ),
    Mutant(
        "C31 a state is rounded after each token, wherever a step ends",
        "ops/triton/recurrence.py",
        "        rounded = h.to(state.dtype.element_ty)\n        h = rounded.to(tl.float32)\n",
        "        rounded = h.to(state.dtype.element_ty)\n",
        "ops/test_triton.py::test_c31_a_recurrence_has_the_same_bits_however_its_tokens_come",
    ),
    Mutant(
        "C31 a scan loads the inputs of the next token, however few a step has",
        "ops/triton/recurrence.py",
        "        next_b = tl.load(b + (token + 1) * b_token + n, mask=live_n & some, other=0.0)\n",
        "        next_b = tl.load(b + (token + (stop - first > 2)) * b_token + n, mask=live_n & some, other=0.0)\n",
        "ops/test_triton.py::test_c31_a_recurrence_has_the_same_bits_however_its_tokens_come",
    ),
    Mutant(
        "C31 a chunk of a recurrence begins at a position of the sequence, not with the step's tokens",
        _SCANS,
        "    return first - tl.load(positions + first) % CHUNK\n",
        "    return first - tl.load(positions + first) * 0\n",
        _ANY_CUT,
    ),
    Mutant(
        "C31 the chunks of a sequence that has an open one are all prepared",
        _SCANS,
        "owner(q_start, num_seqs, block, CHUNK, 2)",
        "owner(q_start, num_seqs, block, CHUNK, 1)",
        _ANY_CUT,
    ),
    Mutant(
        "C31 a state is rounded behind each chunk, wherever a step ends",
        _SCANS,
        "            after = tl.fma(h, all_left, dot32(xs32 * into_state[None, :], bs, WHOLE))\n"
        "            h = tl.where(begin + CHUNK <= stop, after.to(kept).to(tl.float32), h)\n",
        "            after = tl.fma(h, all_left, dot32(xs32 * into_state[None, :], bs, WHOLE))\n"
        "            h = tl.where(begin + CHUNK <= stop, after, h)\n",
        _ANY_CUT,
    ),
    Mutant(
        "C31 the state of a chunk that is open stays what it was at the chunk's beginning",
        _SCANS,
        "            after = tl.fma(h, all_left, dot32(xs32 * into_state[None, :], bs, WHOLE))\n"
        "            h = tl.where(begin + CHUNK <= stop, after.to(kept).to(tl.float32), h)\n",
        "            after = tl.fma(h, all_left, dot32(xs32 * into_state[None, :], bs, WHOLE))\n"
        "            h = after.to(kept).to(tl.float32)\n",
        _ANY_CUT,
    ),
    Mutant(
        "C16 a snapshot has what earlier steps brought of its open chunk",
        _SCANS,
        "wanted = (token < end) & (new | (to != slot)) & (to > 0)",
        "wanted = (token < end) & new & (to > 0)",
        "ops/test_triton.py::test_recurrences_equal_the_reference",
    ),
    Mutant(
        "C16 a snapshot in the chunk with which a step begins gets the state before it",
        _SCANS,
        "mask=live_p & live_n & (to > 0) & changed)",
        "mask=live_p & live_n & (to > 0) & (opened_at + CHUNK <= until))",
        _ANY_CUT,
    ),
    Mutant(
        "C14 padding columns are no part of a scan's sums",
        _SCANS,
        "        live = (n < D)[None, :]\n",
        "        live = (n >= 0)[None, :]\n",
        "ops/test_triton.py::test_recurrences_equal_the_reference",
    ),
    Mutant(
        "C31 a delta rule's token writes without what those before it wrote",
        _SCANS,
        "        for t in range(1, tl.minimum(stop - begin, CHUNK).to(tl.int32)):\n",
        "        for t in range(2, tl.minimum(stop - begin, CHUNK).to(tl.int32)):\n",
        "ops/test_triton.py::test_recurrences_equal_the_reference",
    ),
    Mutant(
        "C31 states are loaded in pieces of 16 bytes, so that a decode waits for their bytes alone",
        _SCANS,
        "tl.multiple_of((rows.to(tl.int64) + slot * ROW + OFFSET).to(tl.pointer_type(dtype)), 16)",
        "(rows.to(tl.int64) + slot * ROW + OFFSET).to(tl.pointer_type(dtype))",
        "ops/test_triton_ptx.py::test_kernels_load_wide_pieces_and_products_fill_matrix_units_without_spills",
    ),
    Mutant(
        "C31 codes are loaded in pieces of 16 bytes, not one word a thread",
        _PRODUCTS,
        "            tl.multiple_of(tl.load(here).to(tl.pointer_type(tl.int32 if BITS >= 4 else tl.uint8)), 16)\n",
        "            tl.load(here).to(tl.pointer_type(tl.int32 if BITS >= 4 else tl.uint8))\n",
        "ops/test_triton_ptx.py::test_kernels_load_wide_pieces_and_products_fill_matrix_units_without_spills",
    ),
    Mutant(
        "C31 two products share the rows of a weight only if their bits are the same",
        "ops/triton/choices.py",
        "if not all(torch.equal(our(rows[:count]), whole[:count]) for count in counts)",
        "if not all(torch.allclose(our(rows[:count]), whole[:count]) for count in counts)",
        "ops/test_triton_choices.py::test_c31_triton_computes_few_rows_if_it_is_faster_and_has_the_same_bits",
    ),
    Mutant(
        "C31 a choice is kept for the machine on which it was tried",
        "ops/triton/choices.py",
        "_checked(kept.get(self._machine, {}).get(key))",
        "_checked(next(iter(kept.values()), {}).get(key))",
        "ops/test_triton_choices.py::test_choices_are_probed_once_for_each_shape_and_machine_and_kept",
    ),
    Mutant(
        "C31 lanes beyond a row are no part of its sums",
        "ops/triton/rowwise.py",
        "values = tl.where(live, values - tl.sum(values, 0) / n, 0.0)",
        "values = values - tl.sum(values, 0) / n",
        "ops/test_triton.py::test_layer_norms_equal_the_reference",
    ),
    Mutant(
        "C31 the sum of a product is not divided by the number of rows",
        _PRODUCTS,
        "    depth = depth_of(x.dtype, form)\n",
        "    depth = depth_of(x.dtype, form) * (1 + (counts[0] > 64))\n",
        _ANY_ROWS,
    ),
    Mutant(
        "C31 the last step of a product in codes may be a part of one",
        _PRODUCTS,
        "low = tl.load(low_at + word, mask=live_col[:, None] & (word < low_pitch), other=0)",
        "low = tl.load(low_at + word, mask=live_col[:, None] & (start + DEPTH <= k), other=0)",
        _IN_CODES,
    ),
    Mutant(
        "C31 a decode adds up 8-bit keys in a prompt's order",
        "ops/triton/codes.py",
        "    if not INTERPRETED:\n        codes = tl.inline_asm",
        "    if False:\n        codes = tl.inline_asm",
        "ops/test_triton_ptx.py::test_kernels_load_wide_pieces_and_products_fill_matrix_units_without_spills",
    ),
    Mutant(
        "C31 FP8 keys and values are rounded to the nearest code",
        "ops/triton/codes.py",
        "(bits + 0x7FFFF + ((bits >> 20) & 1))",
        "(bits + 0x80000)",
        "ops/test_triton.py::test_fp8_kv_is_rounded_to_the_nearest_code_of_all",
    ),
    Mutant(
        "C31 codes are multiplied by the scale of their own group",
        "ops/triton/codes.py",
        "at = (start + tl.arange(0, DEPTH // UNIT) * UNIT)[None, :]",
        "at = (start + tl.arange(0, DEPTH // UNIT) * UNIT + 32)[None, :]",
        _IN_CODES,
    ),
    Mutant(
        "C31 a kernel compiled for aligned addresses is launched for no other",
        _LAUNCH,
        "return value.dtype, value.data_ptr() % _ALIGNED",
        "return value.dtype, 0",
        "ops/test_triton_launch.py::test_variant_key_differs_wherever_triton_compiles_another_variant",
    ),
    Mutant(
        "C27 a kernel that finds no memory is tried again in the next step",
        _LAUNCH,
        "            if is_out_of_memory(error):\n                raise\n",
        "",
        "ops/test_triton_launch.py::test_kernel_that_finds_no_memory_is_no_kernel_that_does_not_compile",
    ),
    Mutant(
        "C27 an op whose kernel does not compile is computed by its definition, and named",
        "ops/triton/fallbacks.py",
        "        if name not in found:\n",
        "        if found:\n",
        "ops/test_triton_launch.py::test_op_whose_kernel_does_not_compile_writes_what_its_definition_does",
    ),
    Mutant(
        "C26 a copy to the host waits for the steps that wrote its slots",
        "pools/copy_stream.py",
        "        self._stream.wait_event(torch.cuda.current_stream(self._device).record_event())\n",
        "",
        f"{_COPIES}::test_c26_a_copy_of_a_retracted_request_has_what_steps_wrote_before_it_and_later_steps_read_it",
    ),
    Mutant(
        "C26 steps behind a copy from the host wait for it",
        "pools/copy_stream.py",
        "        current.wait_event(self._stream.record_event())\n",
        "",
        f"{_COPIES}::test_c26_a_copy_of_a_retracted_request_has_what_steps_wrote_before_it_and_later_steps_read_it",
    ),
    Mutant(
        "C26 a GPU's memory is not given back while a copy reads it",
        "pools/copy_stream.py",
        "        rows.record_stream(self._stream)\n",
        "",
        f"{_COPIES}::test_c26_a_copy_of_a_retracted_request_has_what_steps_wrote_before_it_and_later_steps_read_it",
    ),
    Mutant(
        "C25 packed weights of a GPU lie where new ones are written",
        "ops/triton/linear.py",
        "None if part is None else memory.placed(part)",
        "None if part is None else part",
        "models/test_triton_reload.py::test_c25_weights_loaded_again_are_those_that_kernels_of_a_gpu_read",
    ),
    Mutant(
        "C31 a pinned buffer is filled again once a GPU has what was in it",
        "ops/uploads.py",
        "                sent.synchronize()\n",
        "                pass\n",
        "ops/test_uploads.py::test_uploads_convert_and_copy_in_parts_of_a_buffer",
    ),
    Mutant(
        "C31 the host reads a copy of a GPU's rows once it is there",
        "runtime/host/tier_stores.py",
        "                written.synchronize()\n",
        "",
        f"{_COPIES}::test_c31_a_tier_gets_rows_of_a_gpu_once_they_have_arrived_and_gives_them_back",
    ),
    Mutant(
        "C27 running out of a GPU's memory is an error of one step",
        "base/heap.py",
        '"out of memory", ',
        "",
        "base/test_heap.py::test_is_out_of_memory_true_for_libraries_of_a_gpu",
    ),
    Mutant(
        "C31 the sums of a token's streams are not divided by the number of tokens",
        "ops/triton/streams.py",
        "        DEPTH=_DEPTH,\n",
        "        DEPTH=_DEPTH if tokens > 8 else _DEPTH // 4,\n",
        f"{_COMPRESSED}::test_c31_a_token_s_streams_have_the_same_weights_among_any_number_of_tokens",
    ),
    Mutant(
        "C31 tokens before a window are no part of the sums of compressed attention",
        "ops/triton/compression.py",
        "seen = (at >= oldest) & (at <= position)",
        "seen = at <= position",
        f"{_COMPRESSED}::test_attention_over_a_window_and_entries_equals_the_reference",
    ),
    Mutant(
        "C31 padding rows, places without a token, are no part of the sums of a block's entry",
        "ops/triton/compression.py",
        'gates = tl.where(live, gates, float("-inf"))',
        'gates = tl.where((d < D)[None, :], gates, float("-inf"))',
        f"{_COMPRESSED}::test_compressed_blocks_and_kept_states_equal_the_reference",
    ),
    Mutant(
        "C23 a column of a hot buffer that the step uses is not replaced on a GPU",
        _TIERS,
        "free = (c < C) & (last < now)",
        "free = (c < C) & (last <= now)",
        "ops/test_triton_tiers.py::test_swap_in_of_a_gpu_equals_a_dictionary",
    ),
    Mutant(
        "C23 a token that several queries select takes one column of a GPU's hot buffer",
        _TIERS,
        "wanted = missing & (column < 0)",
        "wanted = missing",
        "ops/test_triton_tiers.py::test_swap_in_of_a_gpu_does_what_other_backends_do",
    ),
    Mutant(
        "C23 the host's memory behind a GPU's is mapped for both to read and write",
        "pools/cuda_range.py",
        "readers = [device] if part.location is device else [device, host]",
        "readers = [part.location]",
        "pools/test_cuda_range.py::test_map_range_host_memory_begins_behind_the_piece_in_which_the_device_s_ends",
    ),
    Mutant(
        "C22 prefill unmaps a GPU's memory with its last view",
        "pools/cuda_shared.py",
        "    weakref.finalize(memory, _unmap, cuda, address, size).atexit = False  # the driver does it\n",
        "",
        "pools/test_cuda_shared.py::test_c22_a_mapped_file_is_unmapped_with_its_last_view",
    ),
    Mutant(
        "C22 a GPU's memory lives until the last process has unmapped it",
        "pools/cuda_shared.py",
        "            cuda.cuMemRelease(handle)  # the mapping keeps the memory\n",
        "            pass\n",
        "pools/test_cuda_shared.py::test_c22_a_mapped_file_is_unmapped_with_its_last_view",
    ),
    Mutant(
        "C22 every word of a chunk is in a GPU's checksum",
        "transfer/wire/memory.py",
        "(words * self._factors[: len(words)]).sum()",
        "(words * self._factors[: len(words)])[:-1].sum()",
        "transfer/test_shared_gpu.py::test_c22_a_word_that_changes_after_it_was_written_is_found",
    ),
)
