"""Rules of the tiers of the prefix cache behind the device."""

from typing import Final

from tests.mutants.mutant import Mutant

_SEEDS: Final = "simulation/test_cache_tiers.py::test_c19_tiers_random_traffic_gives_the_tokens_of_the_reference[5]"
_TIERS: Final = "scheduler/memory/tiers.py"
_ENGINE: Final = "integration/test_cache_tiers.py::"
_EVERY_TYPE: Final = _ENGINE + "test_c19_host_tier_every_model_type_gives_the_bits_of_a_cold_engine"

_CHECKS: Final = "engine/loop/cache_checks.py"
_CHECKED: Final = "integration/test_cache_checks.py::"

TIERS = (
    Mutant(
        "C32 a load is made where measured rates say that it is faster than computing",
        _TIERS,
        "        worth = self.rates.worth(tier.name)\n",
        "        worth = self._config.kinds.recompute_bytes_per_token\n",
        "scheduler/test_tiers.py::test_tiers_prefix_is_loaded_or_computed_by_measured_rates",
    ),
    Mutant(
        "C27 a request whose prefix is being loaded keeps its row",
        "scheduler/admission.py",
        " - self._num_loading)",
        ")",
        "scheduler/test_tiers.py::test_tiers_next_in_line_does_not_take_the_row_of_a_request_that_is_loading",
    ),
    Mutant(
        "C32 a tier that was slow once is tried again",
        _TIERS,
        "            self.rates.refused(tier.name)\n",
        "",
        "scheduler/test_tiers.py::test_tiers_load_that_is_measured_as_slow_is_tried_again_later",
    ),
    Mutant(
        "C30 a checksum is compared with each row that is read",
        "runtime/host/disk_store.py",
        "            if xxhash.xxh3_64_intdigest(memory[number * width : (number + 1) * width]) != place.checksum:\n",
        "            if not width:\n",
        "integration/test_prefix_files.py::test_c30_flipped_byte_of_a_row_is_found_and_computed_again[middle]",
    ),
    Mutant(
        "C29 a secret that others could read is refused",
        "formats/prefix_files.py",
        "or status.st_mode & 0o077:",
        "or status.st_mode & 0o007:",
        "integration/test_prefix_files.py::test_c29_secret_is_made_once_and_must_be_this_users_alone",
    ),
    Mutant(
        "C29 a secret is made whole or not at all",
        "formats/prefix_files.py",
        "        with contextlib.suppress(FileExistsError):\n            os.link(made, path)\n    finally:\n",
        "    finally:\n        with contextlib.suppress(FileExistsError):\n            os.link(made, path)\n",
        "formats/test_prefix_files.py::test_c29_secret_whose_writer_is_killed_is_made_anew[half]",
    ),
    Mutant(
        "C31 a segment of other weights is ignored",
        "runtime/host/disk_store.py",
        "            if differs := prefix_files.difference(identity, self._identity):\n",
        "            if differs := prefix_files.difference(identity, {**self._identity, **identity}):\n",
        "integration/test_prefix_files.py::test_c31_other_identity_is_ignored_and_both_values_are_logged",
    ),
    Mutant(
        "C34 what is computed with weights that changed since the start is in no file",
        "requests/request.py",
        "        if self.weight_version or (self.adapter and",
        "        if (self.adapter and",
        _ENGINE + "test_c34_weights_that_change_find_nothing_in_any_tier",
    ),
    Mutant(
        "C8 a load that lands after its tree was emptied is dropped",
        _TIERS,
        "        if lost or was_dropped:\n",
        "        if lost:\n",
        "scheduler/test_tiers.py::test_tiers_flush_of_a_load_in_flight_keeps_nothing_of_it",
    ),
    Mutant(
        "C30 what follows the last whole record is not read",
        "formats/prefix_files.py",
        " or begin + row_bytes > self.num_bytes:",
        ":",
        "formats/test_prefix_files.py::test_writer_killed_at_every_write_leaves_all_whole_records[half]",
    ),
    Mutant(
        "C6 a mover copies all tensors that layers declare",
        "pools/mover.py",
        "[tensor for _, tensor in table.entries] for",
        "[tensor for _, tensor in table.entries][:1] for",
        "pools/test_movers.py::test_mover_every_model_type_every_declared_column_comes_back[host_rows]",
    ),
    Mutant(
        "C6 copy-on-write copies all tensors that layers declare",
        "pools/table.py",
        "for _, tensor in self.entries:",
        "for _, tensor in [*self.entries][:1]:",
        "pools/test_movers.py::test_mover_every_model_type_every_declared_column_comes_back[copy_on_write]",
    ),
    Mutant(
        "C30 a check compares windows and states, too",
        _CHECKS,
        "        for name, part in tier.parts.items():\n",
        "        for name, part in [*tier.parts.items()][:0]:\n",
        _CHECKED + "test_c30_check_entry_that_differs_is_dropped_with_its_descendants[falcon_h1-state]",
    ),
    Mutant(
        "C30 a check drops what differs from every tier",
        _CHECKS,
        "            tier.cache.discard(key, first, namespace)\n",
        "            if tier is entry.tier:\n                tier.cache.discard(key, first, namespace)\n",
        _CHECKED + "test_c30_check_of_a_tier_drops_what_differs_there_and_what_was_loaded_from_there[True]",
    ),
    Mutant(
        "C19 a check computes without the cache",
        _CHECKS,
        "scheduler.add(self._request(tokens, CHECK, entry.like.adapter), now)",
        "scheduler.add(entry.like, now)",
        _CHECKED + "test_c30_check_entry_that_differs_is_dropped_with_its_descendants[llama-kv]",
    ),
    Mutant(
        "C27 a request that arrives ends a check",
        "engine/loop/core.py",
        "        self._progressed = True\n        self.checks.stop()\n",
        "        self._progressed = True\n",
        _CHECKED + "test_c27_request_that_arrives_in_a_check_ends_it_and_has_the_tokens_of_a_cold_engine[0-2]",
    ),
    Mutant(
        "C27 the time before a check is no hang",
        "engine/loop/loop.py",
        "            self._core.stats.last_step_at = began  # the time without work is no delay\n",
        "",
        "engine/test_loop.py::test_loop_idle_engine_checks_its_cache_until_a_request_arrives",
    ),
    Mutant(
        "C8 an engine looks for leaked pages in no check",
        "engine/loop/loop.py",
        "        rests = self._core.idle and not self._core.checks.computing\n",
        "        rests = self._core.idle\n",
        "engine/test_loop.py::test_loop_idle_engine_checks_its_cache_until_a_request_arrives",
    ),
    Mutant(
        "C34 a check computes an entry with its adapter",
        _CHECKS,
        "scheduler.add(self._request(tokens, CHECK, entry.like.adapter), now)",
        "scheduler.add(self._request(tokens, CHECK, None), now)",
        _CHECKED + "test_check_c34_entry_of_an_adapter_is_computed_with_it",
    ),
    Mutant(
        "C29 a check changes no count of clients' requests",
        _CHECKS,
        "        self._scheduler.counters.update(self._counted)\n",
        "",
        _CHECKED + "test_c19_check_every_model_type_finds_the_bits_that_are_cached[llama]",
    ),
    Mutant(
        "C30 a step that fails in a check is counted",
        _CHECKS,
        "{each.name: scheduler.counters[each.name] for each in OF_REQUESTS}",
        "dict(scheduler.counters)",
        _CHECKED + "test_c30_check_whose_step_fails_is_counted_and_the_counts_of_clients_are_not[launch]",
    ),
    Mutant(
        "C20 only a prefix that a file had once is evicted from a file",
        _TIERS,
        "any(self._evicted(req, tier) for tier in self.all if tier.durable)",
        "self.all",
        "scheduler/test_tiers.py::test_tiers_prefix_that_a_file_never_had_is_evicted_from_the_device_alone",
    ),
    Mutant(
        "C30 a load that failed is not attached",
        _TIERS,
        "        if lost or was_dropped:\n",
        "        if was_dropped:\n",
        _SEEDS,
    ),
    Mutant(
        "C8 the slots of a store are free again if no step made it",
        _TIERS,
        "            store.tier.give_back(store.span)\n",
        "            pass\n",
        _SEEDS,
    ),
    Mutant(
        "C8 the slots of a load are free again if no step made it",
        _TIERS,
        "            self._unpin(load)\n            self.device.give_back(load.span)\n        self._loads.clear()\n",
        "            self._unpin(load)\n        self._loads.clear()\n",
        _SEEDS,
    ),
    Mutant(
        "C19 what is loaded is not evicted from its tier before the step that copies it",
        "memory/radix_cache.py",
        "        self._lock(node)\n        num_pages = match.num_tokens // self.page_size\n",
        "        num_pages = match.num_tokens // self.page_size\n",
        _SEEDS,
    ),
    Mutant(
        "C19 the device learns which window a loaded page has",
        _TIERS,
        "            if len(changed):\n                self._pools.draft.remap(pages[changed])\n",
        "",
        _SEEDS,
    ),
    Mutant(
        "C18 a load brings the state behind its prefix",
        "memory/tier.py",
        "        lacks &= read | ((ends > has) | part.at_ends if whole else False)\n",
        "        lacks &= read & ~np.array(part.at_ends) | ((ends > has) | part.at_ends if whole else False)\n",
        _EVERY_TYPE + "[falcon_h1]",
    ),
    Mutant(
        "C18 a store has the states at all ends where the device's cache keeps one",
        "memory/kinds/state/cached_states.py",
        "            if end <= len(pages) and (slot",
        "            if end < len(pages) and (slot",
        _EVERY_TYPE + "[falcon_h1]",
    ),
    Mutant(
        "C34 a tier's prefixes are those of one namespace",
        "scheduler/memory/tier_copies.py",
        "    return req.durable_namespace if tier.durable else req.cache_namespace\n",
        '    return req.durable_namespace if tier.durable else ""\n',
        _ENGINE + "test_c34_host_tier_serves_no_other_adapter",
    ),
    Mutant(
        "C19 a step stores before it overwrites",
        "runtime/steps/inputs.py",
        "            self.tiers.store(stored, places[id(stored)])\n",
        "            pass\n",
        _EVERY_TYPE + "[llama]",
    ),
    Mutant(
        "C27 a request waits for one load after the other, and no longer once one has failed",
        _TIERS,
        "        if found is None or req.load_failed or",
        "        if found is None or",
        "scheduler/test_tiers.py::test_tiers_load_that_fails_is_not_tried_again",
    ),
    Mutant(
        "C32 a load counts as work of its step",
        "scheduler/admission.py",
        "most, left, num_left = most - cost, left - cost, num_left - 1",
        "most, num_left = most - cost, num_left - 1",
        "scheduler/test_tiers.py::test_tiers_load_is_cut_into_slices_that_count_as_prompt_tokens",
    ),
    Mutant(
        "C19 a flush empties every tier",
        "scheduler/scheduler.py",
        "        self.memory.tiers.clear()\n",
        "",
        "scheduler/test_tiers.py::test_tiers_flush_empties_them",
    ),
)
