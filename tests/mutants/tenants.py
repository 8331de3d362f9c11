"""Rules of C32: how tenants share an engine."""

from tests.mutants.mutant import Mutant

_TEST = "scheduler/test_tenants.py::test_c32_"
_WAITS = (
    "scheduler/test_waits.py::test_c32_request_has_its_first_token_within_a_bound_beyond_what_its_tenants_share_gives"
)
_TURNS = "server/test_preparation.py::test_c32_"
_SHARES = "memory/test_shares.py::test_c32_"
_NODES = "memory/radix_node.py"

TENANTS = (
    Mutant(
        "C32 a tenant that joins has no credit",
        "scheduler/queues.py",
        "            account.service = max(account.service, service)\n",
        "",
        f"{_TEST}tenant_that_was_idle_has_no_credit",
    ),
    Mutant(
        "C32 a charge is divided by the weight",
        "scheduler/admission.py",
        "account.service += num_new / account.weight",
        "account.service += num_new",
        f"{_TEST}two_backlogged_tenants_are_served_by_their_weights",
    ),
    Mutant(
        "C32 generated tokens are charged",
        "scheduler/output_processor.py",
        "        account.service += num_taken / account.weight\n",
        "",
        f"{_TEST}tenant_with_longer_outputs_starts_fewer_requests",
    ),
    Mutant(
        "C32 steps are charged beside their tokens",
        "scheduler/output_processor.py",
        "        account.service += part / account.weight\n",
        "",
        f"{_WAITS}[words-images]",
    ),
    Mutant(
        "C32 a step is charged once, to all that get something from it",
        "scheduler/output_processor.py",
        "part = cost / len(accounts)",
        "part = cost",
        f"{_TEST}step_is_charged_in_equal_parts_to_those_that_get_something_from_it",
    ),
    Mutant(
        "C32 steps that pool are charged",
        "scheduler/output_processor.py",
        " + [flight.reqs[i].account for i in result.vectors or ()]",
        "",
        f"{_TEST}pooled_prompts_are_charged_for_their_steps",
    ),
    Mutant(
        "C32 the cost of a step is measured where prompts cost least",
        "engine/loop/step_cost.py",
        "min(known, default=None)",
        "max(known, default=None)",
        "engine/test_step_cost.py::test_step_cost_settled_is_that_of_the_machine[8]",
    ),
    Mutant(
        "C32 a request waits for prompts of its own tenant alone",
        "scheduler/admission.py",
        "leader.account is not req.account",
        "False",
        f"{_TEST}prompt_waits_for_one_under_way_of_its_own_tenant_alone",
    ),
    Mutant(
        "C32 tokens computed again are not charged",
        "scheduler/admission.py",
        "max(chunk.start, req.num_charged)",
        "chunk.start",
        f"{_TEST}tokens_computed_again_are_not_charged_again",
    ),
    Mutant(
        "C32 a tenant above its share displaces nobody",
        "scheduler/displacing.py",
        " or pages > room.share(req.tenant, num_pages)",
        "",
        f"{_TEST}request_larger_than_its_tenants_share_displaces_nobody",
    ),
    Mutant(
        "C32 a full queue takes a tenant within its share",
        "base/room.py",
        " or own + count <= self.share(tenant, limit)",
        "",
        f"{_TEST}full_queue_refuses_the_tenant_that_fills_it_and_takes_others",
    ),
    Mutant(
        "C32 patience ends with the time as well",
        "requests/account.py",
        " and now - self.waits_since_s < PATIENCE_S",
        "",
        f"{_TEST}long_steps_end_the_patience_by_time",
    ),
    # -- work before admission ----------------------------------------------------------------------------------------
    Mutant(
        "C32 the tenant served least has the next turn",
        "http/preparation.py",
        "key=lambda tenant: (service(tenant), begun[tenant])",
        "key=lambda tenant: begun[tenant]",
        f"{_TURNS}lanes_charge_one_account",
    ),
    Mutant(
        "C32 a turn is charged by the weight",
        "http/preparation.py",
        "account.paid += rate * (self.clock() - began_at) / account.weight",
        "account.paid += rate * (self.clock() - began_at)",
        f"{_TURNS}lane_tenants_are_served_by_their_weights",
    ),
    Mutant(
        "C32 a tenant that joins the queue of turns has no credit",
        "http/preparation.py",
        "if not account.num_turns:\n            others",
        "if False:\n            others",
        f"{_TURNS}lane_tenant_that_was_idle_has_no_credit",
    ),
    Mutant(
        "C32 a lane has a spare place for others",
        "http/preparation.py",
        "self._preparation, self._width, self._max_waiting = preparation, width, max_waiting",
        "self._preparation, self._width, self._max_waiting = preparation, width + SPARE, max_waiting",
        f"{_TURNS}lane_full_of_one_tenant_serves_another_at_once[2]",
    ),
    Mutant(
        "C32 a spare place has a limit",
        "http/preparation.py",
        "if not begun[tenant] and service(tenant) <= most]",
        "if not begun[tenant]]",
        f"{_TURNS}lane_tenant_served_far_more_than_others_gets_no_spare_place[2.5-False]",
    ),
    Mutant(
        "C32 a full lane takes a tenant within its share",
        "http/preparation.py",
        "if not self._room.has_room(client.tenant, self._max_waiting):",
        "if self._room.num_inside >= self._max_waiting:",
        f"{_TURNS}full_lane_refuses_the_tenant_that_fills_it_and_takes_others",
    ),
    # -- the prefix cache ---------------------------------------------------------------------------------------------
    Mutant(
        "C32 the tenant that holds the most loses first",
        _NODES,
        "self._order[-1 - num_spent]",
        "self._order[num_spent]",
        f"{_SHARES}tenant_that_floods_the_cache_loses_its_own",
    ),
    Mutant(
        "C32 what a tenant holds counts by its weight",
        _NODES,
        "self.held[tenant] / self._tenants.weight(tenant)",
        "float(self.held[tenant])",
        f"{_SHARES}share_of_the_cache_is_that_of_the_weight",
    ),
    Mutant(
        "C32 a tenant loses no more than makes it equal to the next",
        _NODES,
        "        return min(int(load * self._tenants.weight(tenant)), self.held[tenant] - 1)\n",
        "        return 0\n",
        f"{_SHARES}two_tenants_lose_alike_once_they_hold_as_much",
    ),
    Mutant(
        "C32 an idle tenant loses first",
        _NODES,
        "sorted(self._tenants.idle & self.held.keys())",
        "()",
        f"{_SHARES}tenant_idle_for_an_hour_loses_first",
    ),
    Mutant(
        "C32 a tenant that comes back is idle no more",
        _NODES,
        "        self._idle.discard(tenant)\n",
        "",
        f"{_SHARES}idle_tenant_that_comes_back_has_its_share",
    ),
    Mutant(
        "C32 a request that came long ago uses the cache now",
        _NODES,
        "self._now = max(self._now, at)",
        "self._now = at",
        f"{_SHARES}idle_tenant_that_comes_back_has_its_share",
    ),
    Mutant(
        "C32 a tenant whose nodes stood above others' has another turn",
        _NODES,
        "        while (yield from self._round()):\n            pass\n",
        "        yield from self._round()\n",
        f"{_SHARES}pages_below_which_another_tenant_goes_on_are_evicted_behind_its_own",
    ),
    Mutant(
        "C32 a tenant whose slots are all in use is passed over",
        _NODES,
        "            num_spent += self.held[tenant] == before\n",
        "            if self.held[tenant] == before:\n                break\n",
        f"{_SHARES}slots_in_use_are_passed_over",
    ),
    Mutant(
        "C32 a state is charged to the tenant that attached it",
        "memory/kinds/state/cached_states.py",
        "_Cached(slot, pin.tenant)",
        "_Cached(slot, node.tenant)",
        f"{_SHARES}state_is_charged_to_the_tenant_that_attached_it",
    ),
    Mutant(
        "C32 a split of the tree keeps the tenant",
        "memory/radix_cache.py",
        "node.author, node.tenant)",
        "node.author)",
        f"{_SHARES}state_is_charged_to_the_tenant_that_attached_it",
    ),
    Mutant(
        "C32 a guess takes no state from a tenant that has none to spare",
        "memory/kinds/state/cached_states.py",
        "victim is not None and self._at[victim].rank == _SHADOWED",
        "any(cached.rank == _SHADOWED for cached in self._at.values())",
        f"{_SHARES}state_that_nobody_misses_is_one_of_the_tenant_that_would_lose_it",
    ),
    Mutant(
        "C32 windows that come back are charged again",
        "memory/kinds/window/windows.py",
        "                self.shares.add(node.tenant, self.num_kept(node) - before)\n",
        "                pass\n",
        f"{_SHARES}windows_that_come_back_are_charged_again",
    ),
    Mutant(
        "C32 a flush drops what is oldest, whosever it is",
        "memory/radix_cache.py",
        "self._evict(self._oldest(), ",
        "self._evict(self._victims(), ",
        f"{_SHARES}flush_spares_what_another_tenant_adds_meanwhile",
    ),
    Mutant(
        "C32 the scheduler names the tenant to the cache",
        "scheduler/memory/allocator.py",
        "req.author, req.tenant, req.arrival)",
        "req.author)",
        "soak/test_shares.py::test_c32_flood_of_one_key_leaves_the_checkpoints_of_another",
    ),
    Mutant(
        "C32 the cache knows the weights of tenants",
        "scheduler/memory/pools.py",
        "            weights=config.tenants,\n",
        "",
        "scheduler/test_scarce_states.py::test_c32_flood_of_one_tenant_leaves_the_conversations_of_another_by_its_weight",
    ),
)
