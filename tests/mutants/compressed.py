"""Rules of compressed attention: rings, entries, and which of them a query reads."""

from tests.mutants.mutant import Mutant

_MODELS = "models/test_compressed.py::"
_ORACLE = "models/test_oracle.py::"
_ENGINE = "engine/test_compressed.py::test_tokens_are_the_same_in_all_circumstances"

COMPRESSED = (
    Mutant(
        "C24 C16 a ring has room for the tokens that a step reads and for all that it may reject",
        "pools/cache_spec.py",
        "max(types.width, _PAIR_WIDTH if types.movable else 1) - 1",
        "max(types.width, _PAIR_WIDTH if types.movable else 1) - 2",
        _MODELS + "test_rejected_tokens_of_every_width_leave_no_trace",
    ),
    Mutant(
        "C24 positions decide which places of a ring are empty, not what a row's last request left there",
        "ops/reference/compression.py",
        "exists = live.unsqueeze(1) & (at >= 0)",
        "exists = live.unsqueeze(1).expand_as(at)",
        _MODELS + "test_tokens_one_by_one_behind_a_row_s_last_request_give_the_logits_of_transformers",
    ),
    Mutant(
        "C24 the block before is of the same conversation",
        "ops/reference/compression.py",
        "places = _places(rows.index_select(0, last).unsqueeze(1)",
        "places = _places(rows.index_select(0, last).flip(0).unsqueeze(1)",
        _ORACLE + "test_mixed_batches_give_each_sequence_its_own_logits",
    ),
    Mutant(
        "C28 an entry is rotated at the position of its first token",
        "ops/reference/compression.py",
        "first=torch.where(live, at[:, -rate], 0)",
        "first=torch.where(live, at[:, -1], 0)",
        _ORACLE + "test_prefill_gives_the_logits_of_transformers",
    ),
    Mutant(
        "C28 a token's bias is that of its place in the block, wherever the step begins",
        "ops/reference/compression.py",
        "torch.where(there, gates + shift, nothing)",
        "torch.where(there, gates + bias[blocks.tokens % rate].repeat(1, 1, 2)[..., : gates.shape[2]], nothing)",
        _ORACLE + "test_every_chunk_size_gives_the_logits_of_transformers",
    ),
    Mutant(
        "C28 layers without entries are rotated with a theta of their own",
        "models/families/deepseek_v4.py",
        "(config.rope_theta, config.rope_scaling) if kind == SLIDING else config.compress_rope",
        "config.compress_rope",
        _ORACLE + "test_prefill_gives_the_logits_of_transformers",
    ),
    Mutant(
        "C28 a query sees the entries of whole blocks up to itself",
        "ops/reference/compression.py",
        "((positions + 1) // rate).int()",
        "(positions // rate).int()",
        _ORACLE + "test_prefill_gives_the_logits_of_transformers",
    ),
    Mutant(
        "C24 tokens without a page of their own end no block and are kept nowhere",
        "ops/reference/compression.py",
        "real = loc >= paged.page_size",
        "real = loc >= 0",
        "ops/test_compression.py::test_planned_blocks_are_the_reference_s",
    ),
    Mutant(
        "C5 a selection of entries that failed makes the query's attention NaN",
        "ops/reference/compression.py",
        "torch.where(counts == 0, -1, counts)",
        "counts",
        "ops/test_compression.py::test_a_failed_selection_gives_nan_and_an_empty_one_the_window",
    ),
    Mutant(
        "C26 a request's ring comes back with its host copy",
        "memory/kinds/ring/rings.py",
        "return as_ids([allocation.row])",
        "return NO_IDS",
        f"{_ENGINE}[host copies]",
    ),
    Mutant(
        "C21 states that go to an engine with other pages have a place for each token",
        "pools/cache_spec.py",
        "        if not types.movable:\n            return BlockStates.columns(self, types)\n",
        "        return BlockStates.columns(self, types)\n",
        "integration/test_two_engines.py::test_c21_c28_two_engines_say_what_one_says",
    ),
    Mutant(
        "C24 pages hold whole entries",
        "config/resolve.py",
        "if page % (multiple := facts.model.page_multiple):",
        "if page % (multiple := 1):",
        "engine/test_compressed.py::test_a_page_size_without_whole_entries_is_refused",
    ),
)
