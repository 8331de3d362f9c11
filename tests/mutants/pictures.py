"""Rules of pictures in prompts: their ids, their memory, and the slices of the encoder's work."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

_MEMORY: Final = "memory/test_pictures.py::"
_SCHEDULER: Final = "scheduler/test_pictures.py::"
_TRAFFIC: Final = (
    "simulation/test_pictures.py::test_c34_pictures_random_traffic_tokens_are_those_of_each_request_alone[seeds0]"
)
_ROPE: Final = "integration/test_rope_positions.py::"
_KEY: Final = "    return namespace, its.digest, its.grid, its.sizes\n"

PICTURES: Final = (
    Mutant(
        "C34 keys of the prefix cache are ids of pictures, not placeholders",
        "scheduler/encoding.py",
        "    req.pictures.write_ids(req.tokens)\n",
        "",
        _SCHEDULER + "test_c34_placeholders_of_another_picture_are_no_hit",
    ),
    Mutant(
        "C34 the grid is part of a picture's key",
        "memory/pictures.py",
        _KEY,
        "    return namespace, its.digest, (0, 0), its.sizes\n",
        _MEMORY + "test_c34_equal_pictures_have_one_run_and_others_by_digest_grid_sizes_or_namespace_their_own",
    ),
    Mutant(
        "C34 the sizes of tiles are part of a picture's key",
        "memory/pictures.py",
        _KEY,
        "    return namespace, its.digest, its.grid, ()\n",
        _MEMORY + "test_c34_equal_pictures_have_one_run_and_others_by_digest_grid_sizes_or_namespace_their_own",
    ),
    Mutant(
        "C28 each tile of a picture has the rows of its own tokens",
        "scheduler/encoding.py",
        "encoding.rows[its.tokens].copy()",
        "encoding.rows[: its.tokens.stop - its.tokens.start].copy()",
        _TRAFFIC,
    ),
    Mutant(
        "C28 a slice costs what a tile of its size costs",
        "scheduler/encoding.py",
        "config.layers_within(its.size, its.planned, budget)",
        "config.layers_within(encoding.tiles[0].size, its.planned, budget)",
        _SCHEDULER + "test_tiles_of_one_picture_cost_what_their_own_sizes_cost",
    ),
    Mutant(
        "C28 a layer with windows costs what its tokens see",
        "config/pictures.py",
        "seen = min(count, self.seen_tokens[layer]) if self.seen_tokens else count",
        "seen = count",
        _SCHEDULER + "test_layers_with_windows_cost_what_their_tokens_see",
    ),
    Mutant(
        "C29 two namespaces share no run of ids",
        "memory/pictures.py",
        _KEY,
        '    return "", its.digest, its.grid, its.sizes\n',
        _MEMORY + "test_c34_equal_pictures_have_one_run_and_others_by_digest_grid_sizes_or_namespace_their_own",
    ),
    Mutant(
        "C8 an encoding with users is not evicted",
        "memory/pictures.py",
        "            if not encoding.num_users:\n                self._let_go(encoding)\n",
        "            self._let_go(encoding)\n",
        _MEMORY + "test_c8_picture_of_two_requests_stays_when_one_of_them_leaves",
    ),
    Mutant(
        "C13 row 0 of the encodings is never written",
        "memory/pictures.py",
        "((encoding.blocks - 1) * size + 1)",
        "((encoding.blocks - 1) * size)",
        _MEMORY + "test_rows_lie_in_blocks_and_never_in_row_0",
    ),
    Mutant(
        "C34 penalties count no ids of pictures",
        "scheduler/step_draft.py",
        "token_ids=tokens if pictures is None else pictures.as_tokens(tokens),",
        "token_ids=tokens,",
        _SCHEDULER + "test_plans_have_the_placeholder_and_requests_the_exact_ids",
    ),
    Mutant(
        "C28 slices of a tile come in order, those of steps in flight among them",
        "scheduler/encoding.py",
        "layers_within(its.size, its.planned, budget)",
        "layers_within(its.size, its.committed, budget)",
        _SCHEDULER + "test_slices_of_steps_in_flight_follow_each_other",
    ),
    Mutant(
        "C30 unfinished work is dropped after a step that failed",
        "memory/pictures.py",
        "            self.drops.add(encoding.number)\n",
        "            pass\n",
        _MEMORY + "test_failed_step_sets_unfinished_tiles_back_to_their_pixels",
    ),
    Mutant(
        "C30 work of a failed step does not count",
        "memory/pictures.py",
        "                if tile.committed < self.config.num_layers:\n",
        "                if tile.committed > self.config.num_layers:\n",
        _TRAFFIC,
    ),
    Mutant(
        "C30 what a failed step was to drop is dropped by the next",
        "memory/pictures.py",
        "        self.drops.update(drops)\n",
        "",
        _MEMORY + "test_failed_step_sets_unfinished_tiles_back_to_their_pixels",
    ),
    Mutant(
        "C30 an encoding that is not finite is computed again",
        "scheduler/scheduler.py",
        "        forget_pictures(self.pools, failed)\n",
        "",
        _SCHEDULER + "test_c30_request_whose_numbers_are_not_finite_leaves_no_encoding_behind",
    ),
    Mutant(
        "C30 a slice of work that was dropped does not count when it commits",
        "memory/pictures.py",
        "if encoding is None or step <= encoding.tiles[tile].void_through:",
        "if encoding is None:",
        _MEMORY + "test_unfinished_work_of_a_picture_without_users_is_dropped_and_begins_again",
    ),
    Mutant(
        "C28 a chunk ends in front of a tile that is not encoded",
        "requests/pictures.py",
        "        end = stop if awaited is None else min(stop, awaited[0])\n",
        "        end = stop\n",
        _SCHEDULER + "test_text_before_a_picture_is_computed_while_it_is_encoded",
    ),
    Mutant(
        "C26 a request that comes back from the host waits at its own length",
        "scheduler/admission.py",
        "host_copies.num_tokens(req.id) or match.num_tokens",
        "match.num_tokens",
        _SCHEDULER + "test_c26_request_that_comes_back_from_the_host_starts_at_its_own_length",
    ),
    Mutant(
        "C25 encodings are computed again when the caches were released",
        "memory/pictures.py",
        "        self.forget(self._known.values())\n",
        "",
        _MEMORY + "test_c25_clear_forgets_encodings_and_keeps_ids_and_users",
    ),
    Mutant(
        "C34 ids in use are not given again when the numbering restarts",
        "memory/pictures.py",
        "        self._taken_ids = np.unique(in_use[self.stand_for(in_use)])\n",
        "",
        _MEMORY + "test_ids_restart_behind_the_vocabulary_and_skip_those_in_use",
    ),
    Mutant(
        "C34 the prefix cache is dropped when the numbering restarts",
        "scheduler/encoding.py",
        "    cache.flush()\n",
        "",
        _SCHEDULER + "test_c34_numbering_that_ends_drops_the_prefix_cache_once",
    ),
    Mutant(
        "C32 a tenant is charged for the layers that are computed for it",
        "scheduler/encoding.py",
        "        req.account.service += cost / req.account.weight\n",
        "",
        _SCHEDULER + "test_tenant_is_charged_for_the_layers_that_are_computed_for_it",
    ),
    Mutant(
        "C27 a request whose pictures make a step fail is on trial",
        "scheduler/queues.py",
        "            lengths[req] = max(length, lengths.get(req, 0))\n",
        "            pass\n",
        _SCHEDULER + "test_failed_encoding_of_one_request_ends_it_alone",
    ),
    Mutant(
        "C33 no draft is or contains a picture's id",
        "scheduler/proposer.py",
        "                proposed = proposed[: _first_picture(pictures, proposed)]\n",
        "                pass\n",
        _SCHEDULER + "test_drafts_end_in_front_of_a_picture",
    ),
    Mutant(
        "C33 runs of pictures stand on placeholders",
        "engine/loop/pictures.py",
        "        if (prompt[start : start + length] != its.placeholder).any():\n",
        "        if False:\n",
        "engine/test_picture_checks.py::test_c33_runs_on_other_tokens_than_placeholders_are_refused",
    ),
    Mutant(
        "C13 a row's next request has a delta of its own",
        "runtime/step_inputs.py",
        "self._rows.rope_delta.index_copy_(",
        "self._rows.rope_delta.index_add_(",
        _ROPE + "test_a_rows_next_request_has_its_own_positions",
    ),
    Mutant(
        "C19 positions behind a hit follow from the pictures before them",
        "requests/rope_positions.py",
        "places[own.stop :] + before",
        "places[own.stop :] + rope_delta(runs)",
        _SCHEDULER + "test_mrope_hit_behind_a_picture_continues_from_the_pictures_before_it",
    ),
    Mutant(
        "C34 random traffic: a row's next request has a delta of its own",
        "scheduler/step_draft.py",
        "rope_delta=req.pictures.rope_delta if req.pictures and pictures and pictures.config.mrope else 0,",
        'rope_delta=globals().setdefault(f"{req.allocation.row}", req.pictures.rope_delta if req.pictures else 0)'
        " if pictures and pictures.config.mrope else 0,",
        _TRAFFIC,
    ),
    Mutant(
        "C34 random traffic: a row has the delta of its request's pictures",
        "scheduler/step_draft.py",
        "rope_delta=req.pictures.rope_delta if req.pictures and pictures and pictures.config.mrope else 0,",
        "rope_delta=0,",
        _TRAFFIC,
    ),
    Mutant(
        "C34 random traffic: positions behind a hit follow from the pictures before them",
        "requests/rope_positions.py",
        "places[own.stop :] + before",
        "places[own.stop :] + rope_delta(runs)",
        _TRAFFIC,
    ),
    Mutant(
        "C34 random traffic: rows and columns of a picture are two positions",
        "requests/rope_positions.py",
        "[0 * inside, inside // run.columns, inside % run.columns]",
        "[0 * inside, inside % run.columns, inside // run.columns]",
        _TRAFFIC,
    ),
    Mutant(
        "C28 taking turns, each position has the frequencies of its own section",
        "families/rope.py",
        "3 * self.sizes[i % 3]",
        "3 * self.sizes[-i % 3]",
        "models/test_rope_sections.py::test_sections_that_take_turns_equal_transformers",
    ),
    Mutant(
        "C28 in runs, each position has the frequencies of its own section",
        "families/rope.py",
        "enumerate(self.sizes)",
        "enumerate((self.sizes[0], *self.sizes[:0:-1]))",
        "models/test_rope_sections.py::test_logits_at_three_positions_equal_transformers",
    ),
    Mutant(
        "C28 a token behind a prompt stands at its position plus the delta of its row",
        "runtime/forward.py",
        "tokens.rope_positions, *tokens.batch, deltas)",
        "tokens.rope_positions, *tokens.batch, self.ops.zeros_like(deltas))",
        _ROPE + "test_log_probabilities_are_those_of_the_model_at_the_prompts_positions",
    ),
)
