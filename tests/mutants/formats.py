"""Rules of `formats/`: what the codes of a checkpoint stand for."""

from tests.mutants.mutant import Mutant

_VALUES = "formats/test_float_layers.py::test_codes_and_values_are_those_of_the_definition_to_the_bit"
_EXPERTS = "models/test_turned_experts.py::test_each_expert_has_the_values_of_its_blocks"

_MUSE = "models/test_gguf_muse_glimmer.py::test_converted_muse_glimmer_gives_the_logits_of_the_original"
_DEEPSEEK = "models/test_gguf_deepseek_v4.py::test_converted_deepseek_v4_gives_the_logits_of_the_original"
_GLM = "models/test_gguf_glm5_next.py::test_converted_glm5_next_gives_the_logits_of_the_original"
_QWEN = "models/test_gguf_qwen4.py::test_converted_qwen4_gives_the_logits_of_the_original"

FORMATS = (
    Mutant(
        "C31 a part of a GGUF tensor has the rows that were asked for",
        "formats/gguf_tensor.py",
        "GgufStored(self._stored, raw.part(first, stop), (stop - first, self.shape[-1]), None)",
        "GgufStored(self._stored, raw.part(0, stop - first), (stop - first, self.shape[-1]), None)",
        "models/test_gguf.py::test_glm_with_queries_keys_and_values_in_one_tensor_gives_the_logits_of_the_original",
    ),
    Mutant(
        "C31 a part of a vector has the elements that were asked for",
        "formats/gguf_tensor.py",
        "GgufStored(self._stored, self._raw, (stop - first,), np.arange(first, stop))",
        "GgufStored(self._stored, self._raw, (stop - first,), np.arange(stop - first))",
        "models/test_gguf.py::test_glm_with_queries_keys_and_values_in_one_tensor_gives_the_logits_of_the_original",
    ),
    Mutant(
        "C31 gates of Gemma 3n's sparse layers are cut where the file has it",
        "families/gemma3n_text/gguf.py",
        "return NormalDist().cdf(deviations)",
        "return 0.0",
        "models/test_gguf_gemma3n.py::test_metadata_of_gemma3n_say_what_the_configuration_said",
    ),
    Mutant(
        "C31 rotary pairs of Muse Glimmer's queries and keys are neighbours in a GGUF file",
        "families/muse_glimmer_text/gguf.py",
        "        interleaved_rope=True,\n",
        "",
        _MUSE,
    ),
    Mutant(
        "C31 norms of Muse Glimmer's layers are stored in a GGUF file as they are used",
        "families/muse_glimmer_text/gguf.py",
        "name: less_one(tensor) if name",
        "name: tensor if name",
        _MUSE,
    ),
    Mutant(
        "C31 queries of Muse Glimmer have the factor of the GGUF file's norms",
        "families/muse_glimmer_text/gguf.py",
        '    config["qk_scale_factor"] = _factor(header, _QUERY_NORM)\n',
        "",
        _MUSE,
    ),
    Mutant(
        "C31 layers of Muse Glimmer without a window have no rotary embedding in a GGUF file",
        "families/muse_glimmer_text/gguf.py",
        "[theta if kind == SLIDING else 0 for kind in kinds]",
        "[theta for _ in kinds]",
        _MUSE,
    ),
    Mutant(
        "C31 experts of token ids are whole numbers in a GGUF file",
        "formats/gguf_types.py",
        "blocks.view(np.int32).astype(np.float32)",
        "blocks.view(np.float32)",
        _DEEPSEEK,
    ),
    Mutant(
        "C31 experts of DeepSeek V4 are cut where the GGUF file has it",
        "families/deepseek_v4/gguf.py",
        '    config["swiglu_limit"] = limit(header)\n',
        "",
        _DEEPSEEK,
    ),
    Mutant(
        "C33 blocks of a GGUF file that draft are not among DeepSeek V4's layers",
        "families/deepseek_v4/gguf.py",
        "        leave_out_draft(header)\n",
        "        pass\n",
        "models/test_gguf_deepseek_v4.py::test_blocks_of_deepseek_v4_that_draft_are_left_out",
    ),
    Mutant(
        "C31 decays of GLM-5.3-Flash have no bound if the GGUF file names none",
        "families/glm5_next_text/gguf.py",
        '    config.setdefault("linear_lower_bound", None)  # a null, which is not an absence, for none\n',
        "",
        _GLM,
    ),
    Mutant(
        "C31 the first blocks of GLM-5.3-Flash have no experts, as many as the GGUF file has it",
        "families/glm5_next_text/gguf.py",
        "[DENSE] * dense + [SPARSE] * (count - dense)",
        "[SPARSE] * count",
        _GLM,
    ),
    Mutant(
        "C31 kernels of a delta rule in a GGUF file have a dimension of channels",
        "families/parts/gguf/kimi_delta.py",
        "if _KERNEL.fullmatch(name):",
        "if not name:",
        _GLM,
    ),
    Mutant(
        "C33 blocks of a GGUF file that draft are not among GLM-5.3-Flash's layers",
        "families/glm5_next_text/gguf.py",
        "    leave_out_draft(header)\n",
        "",
        "models/test_gguf_glm5_next.py::test_blocks_of_glm5_next_that_draft_are_left_out",
    ),
    Mutant(
        "C31 norms of Qwen 4's n-grams are stored in a GGUF file as they are used",
        "families/qwen4_exp_text/gguf.py",
        'less_one(tensor) if ".ple.norm_" in name else tensor',
        "tensor",
        _QWEN,
    ),
    Mutant(
        "C31 queries of Qwen 4's indexers are above their keys, which a GGUF file has apart",
        "families/qwen4_exp_text/gguf.py",
        "one_below_the_other(tensor, keys)",
        "one_below_the_other(keys, tensor)",
        _QWEN,
    ),
    Mutant(
        "C31 gates of Qwen 4's delta rules are sigmoids in GGUF files",
        "families/qwen4_exp_text/gguf.py",
        'output_gate_type="sigmoid"',
        'output_gate_type="silu"',
        _QWEN,
    ),
    Mutant(
        "C31 the layer of a GGUF file's table of n-grams is counted from 0",
        "families/qwen4_exp_text/gguf.py",
        "[layers[0] + 1]",
        "[layers[0]]",
        _QWEN,
    ),
    Mutant(
        "C31 rows of a table in codes are as long as their blocks",
        "ops/reference/tables.py",
        "table.width // block.elements * block.num_bytes",
        "table.width * 2",
        "ops/test_tables.py::test_ngram_rows_are_those_of_each_token_and_the_tokens_before",
    ),
    Mutant(
        "C33 hashes of a GGUF file are those that its table is read with",
        "families/qwen4_exp_text/gguf.py",
        "if _numbers(header, key, len(numbers)) != list(numbers):",
        "if len(_numbers(header, key, len(numbers))) != len(numbers):",
        "models/test_gguf_qwen4.py::test_hostile_metadata_of_qwen4_are_named",
    ),
    Mutant(
        "C33 a group may write a file of packed weights only if it shares the folder",
        "base/trust.py",
        "if file.st_gid == folder.st_gid and _is_shared(folder):",
        "if file.st_gid == folder.st_gid:",
        "formats/test_weights_cache.py::test_open_cached_file_that_a_group_may_write_needs_a_folder_that_the_group_shares",
    ),
    Mutant(
        "C33 the contents of packed weights are checked behind the first answer",
        "engine/lifecycle/contents.py",
        "            self._file.check_on_disk()\n",
        "",
        "engine/test_weights_cache.py::test_damaged_contents_end_the_engine_behind_the_first_answer",
    ),
    Mutant(
        "C31 the scale of a block is that of its rows and columns, not of its columns and rows",
        "formats/float_layers.py",
        "        by_block = _float32(scales).reshape(-(-outputs // block[0]), -(-width // block[1]))\n",
        "        by_block = _float32(scales).reshape(-(-width // block[1]), -(-outputs // block[0])).T\n",
        _VALUES,
    ),
    Mutant(
        "C31 the last block of a row may be a part of one, with a scale of its own",
        "formats/float_layers.py",
        "    of_groups = np.arange(0, width, form.group) // block[1]\n",
        "    of_groups = (np.arange(0, width, form.group) // block[1]).clip(max=max(1, width // block[1]) - 1)\n",
        _VALUES,
    ),
    Mutant(
        "C31 127 is taken from an E8M0 exponent, and one more for the doubled levels",
        "formats/quantized.py",
        "scales.astype(np.int32) - (E8M0_BIAS + 1)",
        "scales.astype(np.int32) - E8M0_BIAS",
        _EXPERTS,
    ),
    Mutant(
        "C31 an expert of gpt-oss has the matrix of its number",
        "formats/turned_experts.py",
        "tensors[own] = _Packed(stack, scales, expert, turn,",
        "tensors[own] = _Packed(stack, scales, num_experts - 1 - expert, turn,",
        _EXPERTS,
    ),
    Mutant(
        "C31 gate and up of gpt-oss take turns, gate first",
        "formats/turned_experts.py",
        "                turn = slice(i, None, len(parts))\n",
        "                turn = slice(len(parts) - 1 - i, None, len(parts))\n",
        _EXPERTS,
    ),
    Mutant(
        "C33 NaN of E4M3 is no weight",
        "formats/quantized.py",
        "part.dtype == np.uint8 and has_nan(part)",
        "part.dtype == np.int8 and has_nan(part)",
        "formats/test_float_layers.py::test_what_is_not_finite_is_refused_by_name",
    ),
    Mutant(
        "C28 scales of DeepSeek-V4 are powers of two with a bias of 127",
        "formats/float_layers.py",
        "exponents.astype(np.int32) - 127",
        "exponents.astype(np.int32) - 126",
        "models/test_mixed_floats.py::test_published_v4_files_have_the_values_of_their_codes_to_the_bit[fp4-False]",
    ),
    Mutant(
        "C28 experts of DeepSeek-V4 are in the form that its configuration names",
        "formats/mixed_floats.py",
        "return replace(self.wide, floats=self.experts).format(name, width)",
        "return self.wide.format(name, width)",
        "models/test_mixed_floats.py::test_published_v4_files_have_the_values_of_their_codes_to_the_bit[fp4-False]",
    ),
)
