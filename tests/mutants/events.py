"""Rules of the events of the prefix cache."""

from tests.mutants.mutant import Mutant

_EVENTS = "memory/cache_events.py"
_UNIT = "memory/test_cache_events.py::"

EVENTS = (
    Mutant(
        "C18 routers learn of a page once the step that wrote it has committed",
        "scheduler/memory/tiers.py",
        "            self._stores[copy.number] = Store(tier, target, req)\n",
        '            self._stores[copy.number] = Store(tier, target, req)\n            tier.attach(target, "step")\n',
        "simulation/test_published.py::test_events_replayed_after_random_traffic_equal_the_trees",
    ),
    Mutant(
        "C34 routers learn that a page is gone when no load of its adapter has it any more",
        _EVENTS,
        "        if published.salt.adapter is None:\n",
        "        if True:\n",
        f"{_UNIT}test_page_of_an_adapter_is_gone_only_when_no_load_of_it_has_the_page",
    ),
    Mutant(
        "C34 hashes of events differ between namespaces",
        _EVENTS,
        'self._hasher.digest(f"namespace {salt.name}".encode())',
        'self._hasher.digest(b"namespace")',
        f"{_UNIT}test_c34_hashes_depend_on_tokens_before_them_namespace_and_key",
    ),
    Mutant(
        "C18 routers learn of states",
        _EVENTS,
        "        parts = enumerate(tier.parts.values(), 1)\n",
        "        parts = enumerate((part for part in tier.parts.values() if not part.at_ends), 1)\n",
        "simulation/test_published.py::test_events_replayed_after_random_traffic_equal_the_trees",
    ),
    Mutant(
        "C18 routers learn of a state that a cached prefix gets later",
        "memory/kinds/state/cached_states.py",
        "_shadow(node)\n        if self.tree.watcher is not None:\n            self.tree.watcher.changed(node)\n",
        "_shadow(node)\n",
        "memory/test_radix_kinds.py::test_watcher_learns_of_a_state_that_a_cached_node_gets_and_loses",
    ),
    Mutant(
        "C34 routers learn of files that a start has found",
        _EVENTS,
        "{node: None for node in tier.cache.index.nodes() if node.parent is not None}",
        "{}",
        "integration/test_published.py::test_c34_events_after_a_restart_name_the_files_with_the_hashes_of_before",
    ),
)
