"""Rules of prefixes that clients want kept."""

from typing import Final

from tests.mutants.mutant import Mutant

_RETENTION: Final = "memory/retention.py"
_POOLS: Final = "memory/test_retention.py::"
_SCHEDULER: Final = "scheduler/test_retention.py::"

_IN_TIERS: Final = "scheduler/test_tiered_retention.py::"
_TIERS: Final = "scheduler/memory/retaining.py"

RETENTION = (
    Mutant(
        "C8 a kept prefix is evicted last in each tier",
        "memory/tier.py",
        "            most_retained=config.pinned_cache_fraction,\n",
        "",
        _IN_TIERS + "test_kept_prefix_is_evicted_last_in_a_tier_with_what_it_needs[pages-0]",
    ),
    Mutant(
        "C18 a prefix that a tier keeps has its state and its window",
        "memory/tier.py",
        "        return self._part.in_tree, self._part, self._part.retained\n",
        "        return self._part.in_tree, self._part\n",
        _IN_TIERS + "test_kept_prefix_is_evicted_last_in_a_tier_with_what_it_needs[both-0]",
    ),
    Mutant(
        "C8 a tier keeps a prefix once the last copy of it is made",
        _TIERS,
        "                self._stores[numbers[-1]] = self._stores[numbers[-1]]._replace(retain_at=now)\n",
        "                self._retain_in(tier, req, now)\n",
        _IN_TIERS + "test_kept_prefix_is_evicted_last_in_a_tier_with_what_it_needs[pages-1]",
    ),
    Mutant(
        "C8 retention in a tier ends at its time",
        "scheduler/scheduler.py",
        "        for retention in self.memory.tiers.retentions:\n",
        "        for retention in self.memory.tiers.retentions[:1]:\n",
        _IN_TIERS + "test_kept_prefix_is_kept_in_each_tier_and_ends_there_at_its_time",
    ),
    Mutant(
        "C20 a hit on the device extends the retention in the tiers",
        "scheduler/memory/allocator.py",
        "            self._tiers.retention.use(req, match.num_tokens)\n",
        "            pass\n",
        _IN_TIERS + "test_hit_extends_the_time_in_a_tier_wherever_it_is_read[False]",
    ),
    Mutant(
        "C29 a user sees the estimate of their own key alone",
        "server/admin/what_if.py",
        "        if tenant.is_admin or name == tenant.name\n",
        "",
        "server/test_what_if.py::test_c29_what_if_a_user_sees_their_own_key_and_an_admin_all",
    ),
    Mutant(
        "C20 what a larger cache would reuse is estimated as that cache would",
        "memory/ghosts.py",
        "        np.maximum.at(self._first, self._table.request[known], ",
        "        np.maximum.at(self._first.copy(), self._table.request[known], ",
        "memory/test_ghosts.py::test_ghosts_estimate_what_caches_of_twice_and_four_times_the_size_reuse",
    ),
    Mutant(
        "C8 retention ends at its time",
        "scheduler/scheduler.py",
        "                retention.expire(now)\n",
        "                pass\n",
        _SCHEDULER + "test_prefix_whose_time_is_over_is_evicted_as_any",
    ),
    Mutant(
        "C8 retention ends at a flush",
        "memory/radix_cache.py",
        "        self.retention.end_all()\n",
        "",
        _POOLS + "test_flush_ends_every_retention",
    ),
    Mutant(
        "C8 C27 retained pages are evicted for a request that needs them",
        "memory/radix_cache.py",
        " and retention.is_last(node)):\n                return\n",
        " and retention.is_last(node) and False):\n                return\n",
        _SCHEDULER + "test_c8_kept_prefixes_refuse_no_request",
    ),
    Mutant(
        "C8 no retention is given up that frees no page",
        "memory/radix_cache.py",
        "retention.give_up(lambda node, _: not node.locks and retention.is_last(node))",
        "retention.give_up(lambda node, _: not node.locks)",
        _POOLS + "test_retention_of_a_prefix_that_another_one_continues_is_given_up_behind_that",
    ),
    Mutant(
        "C8 C27 retained states are evicted for a request that needs them",
        "memory/kinds/state/cached_states.py",
        "            elif self.tree.retention.give_up(lambda end, _: self._at[end].locks == 0):\n"
        "                victims = self._victims()\n",
        "",
        _SCHEDULER + "test_c8_kept_states_and_windows_refuse_no_request",
    ),
    Mutant(
        "C8 C27 retained windows are evicted for a request that needs them",
        "memory/kinds/window/cached_windows.py",
        "            missing -= self._evict_unretained(missing)\n        if missing < num_slots:",
        "            break\n        if missing < num_slots:",
        _SCHEDULER + "test_c8_kept_states_and_windows_refuse_no_request",
    ),
    Mutant(
        "C8 C32 no tenant retains more than its part of each pool",
        _RETENTION,
        "<= self.limit(tenant, pool) for pool, count in needed.items())",
        "<= self._slots[pool].capacity for pool, count in needed.items())",
        _POOLS + "test_retention_takes_no_more_than_its_part_of_a_pool",
    ),
    Mutant(
        "C32 the tenants' parts are by weight",
        _RETENTION,
        "self._tenants.get(tenant, 1) / sum(self._tenants.values())",
        "1.0",
        _POOLS + "test_c32_tenant_retains_its_share_by_weight",
    ),
    Mutant(
        "C18 a retained prefix keeps its state",
        "memory/kinds/state/cached_states.py",
        "_RETAINED if node in self.retained else _BRANCH if",
        "_BRANCH if",
        _POOLS + "test_retained_prefix_keeps_what_a_request_needs_to_resume",
    ),
    Mutant(
        "C18 a retained state stays although a later one shadows it",
        "memory/kinds/state/cached_states.py",
        "            if step in self.retained:\n                return\n",
        "",
        _POOLS + "test_retained_state_stays_although_a_later_one_shadows_it",
    ),
    Mutant(
        "C18 a retained prefix keeps its window",
        "memory/kinds/window/cached_windows.py",
        "(self.map.locks[pages] == 0) & (self.map.retained[pages] == 0)",
        "self.map.locks[pages] == 0",
        _POOLS + "test_retained_prefix_keeps_what_a_request_needs_to_resume",
    ),
    Mutant(
        "C8 both parts of a retained edge are retained",
        "memory/radix_cache.py",
        "            self.retention.split(upper, node)\n",
        "            pass\n",
        _POOLS + "test_retention_survives_splits_and_longer_prompts",
    ),
    Mutant(
        "C8 a prefix that loses its leaf loses its retention",
        "memory/radix_cache.py",
        "            self.retention.removed(node)\n",
        "            pass\n",
        _POOLS + "test_retained_leaf_that_is_discarded_leaves_no_retention",
    ),
    Mutant(
        "C20 a hit extends the retention of what it uses",
        "memory/radix_cache.py",
        "            self.retention.use(node, at)\n",
        "            pass\n",
        _POOLS + "test_hit_extends_the_retention_by_its_own_time",
    ),
    Mutant(
        "C8 a prompt that was not computed is not retained",
        "scheduler/memory/allocator.py",
        "            return self.retain(req, now) if req.num_output else (0, 0.0, NotKept.UNFINISHED)\n",
        "            return self.retain(req, now)\n",
        _SCHEDULER + "test_prompt_that_was_not_computed_is_not_kept",
    ),
)
